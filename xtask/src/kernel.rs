// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest kernels: Debian's source with the files of `guest/src` and the hooks of `guest/patches`. The kernels are small, and have loadable
//! modules only if a caller asks for modules. The packages of a kernel are an exception: they have Debian's modules.

mod build;
mod deb;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use self::build::{ARM64, Architecture, X86_64};
use crate::files::read;
use crate::key::Key;
use crate::mails::Part;
use crate::packaged_kernel::{Flavour, packaged_kernel};
use crate::tools::{Tools, Usage};

/// Series that is built by default.
const SERIES: &str = "6.12";

/// Options of a kernel.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestKernel {
    /// Kernel series. The default is 6.12.
    #[arg(long, value_name = "N")]
    pub series: Option<String>,
    /// Build without the files of `guest/src` and the hooks.
    #[arg(long)]
    pub stock: bool,
    /// Apply the patches of the series only up to the end of this part.
    #[arg(long, ignore_case = true, conflicts_with = "stock")]
    pub part: Option<Part>,
    /// Enable the function profiler.
    #[arg(long)]
    pub profile: bool,
    /// Enable debugging checks such as KASAN and lockdep.
    #[arg(long)]
    pub debug: bool,
    /// Use Debian's configuration without its modules.
    #[arg(long)]
    pub debian: bool,
    /// Build for arm64, to run under emulation.
    #[arg(long, conflicts_with_all = ["stock", "part", "profile", "debug", "debian"])]
    pub arm64: bool,
    /// Build Debian packages of the kernel and its headers, with Debian's cloud configuration and its modules.
    #[arg(long, conflicts_with_all = ["stock", "part", "profile", "debug", "debian", "arm64", "modules"])]
    pub deb: bool,
    /// Additional configuration fragments.
    #[arg(long, value_name = "FRAGMENT")]
    pub config: Vec<PathBuf>,
    /// Source directory of modules to build for this kernel.
    #[arg(long, value_name = "DIR", conflicts_with = "arm64")]
    pub modules: Option<PathBuf>,
}

/// Options of `scripts/guest-kernel`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    kernel: GuestKernel,
    /// Only print the result's path, if it exists.
    #[arg(long)]
    print_path: bool,
    /// Print the source tree's path instead of building the kernel.
    #[arg(long)]
    source: bool,
}

/// Inputs of a kernel build.
struct Inputs {
    /// Debian's source package, unpacked.
    package: PathBuf,
    /// Base configuration, which the fragments override. Kconfig may drop an option of the base configuration whose dependencies are
    /// missing.
    base: Option<String>,
    /// Configuration fragments. A later fragment overrides earlier ones.
    fragments: Vec<PathBuf>,
    /// Directory of the series' patches. `None` for a stock kernel.
    patches: Option<PathBuf>,
    /// Last part of the series to apply. `None` for the whole series.
    part: Option<Part>,
    /// Source of modules to build. `None` for no modules.
    modules: Option<PathBuf>,
    /// True if Debian packages are wanted.
    deb: bool,
    series: String,
    architecture: &'static Architecture,
}

impl Tools<'_> {
    /// Returns the path that `scripts/guest-kernel` prints. `None` if only the path is wanted and the kernel is not built.
    ///
    /// # Errors
    /// Fails if the kernel cannot be built, or on a signal.
    pub fn print_guest_kernel(&self, options: &Options) -> Result<Option<PathBuf>> {
        if options.print_path {
            let inputs = self.inputs(&options.kernel)?;
            return Ok(Some(self.built(&self.kernel_key(&inputs)?)).filter(|dir| dir.is_dir()));
        }
        let made =
            if options.source { self.kernel_source(&options.kernel) } else { self.guest_kernel(&options.kernel) };
        made.map(Some)
    }

    /// Returns the directory of a kernel. Builds the kernel if it is missing. The directory contains `bzImage`, `vmlinux` (ELF with a PVH
    /// entry), `config` and the requested modules. For arm64, the directory contains `Image` and `config`. With `deb`, the directory
    /// contains the Debian packages and `config`.
    ///
    /// # Errors
    /// Fails if the kernel cannot be built, or on a signal.
    pub fn guest_kernel(&self, kernel: &GuestKernel) -> Result<PathBuf> {
        let inputs = self.inputs(kernel)?;
        let key = self.kernel_key(&inputs)?;
        let built = self.built(&key);
        if built.is_dir() {
            return Ok(built);
        }
        self.need_packages(
            "to build the guest kernel",
            &["gcc", "make", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "binutils", "lz4"],
        )?;
        self.need_packages("to build the guest kernel", inputs.architecture.packages)?;
        if inputs.deb {
            self.need_packages("to make packages of the guest kernel", &deb::PACKAGES)?;
        }
        self.in_tree(&inputs, |tree, work| {
            let out = work.join(self.out_name(&inputs));
            self.cached("guest-kernel", &key, |dir| {
                if inputs.deb {
                    self.build_deb(tree, &out, &inputs, dir)
                } else {
                    self.build_kernel(tree, &out, &inputs, dir)
                }
            })
        })
    }

    /// Returns a kernel's source tree. Unless the kernel is a stock kernel, the tree has the files of `guest/src` and the hooks.
    ///
    /// # Errors
    /// The same as for [`Tools::guest_kernel`].
    pub fn kernel_source(&self, kernel: &GuestKernel) -> Result<PathBuf> {
        self.in_tree(&self.inputs(kernel)?, |tree, _| Ok(tree.to_path_buf()))
    }

    fn inputs(&self, kernel: &GuestKernel) -> Result<Inputs> {
        let series = kernel.series.clone().unwrap_or_else(|| SERIES.into());
        let patches = patches_of(&self.checkout, &series)?;
        if let Some(file) = kernel.config.iter().find(|file| !file.is_file()) {
            bail!(Usage(format!("--config: '{}' is not a readable file", file.display())));
        }
        for (option, wanted) in [("--debian", kernel.debian), ("--deb", kernel.deb)] {
            if wanted && series != SERIES {
                bail!(Usage(format!("{option}: only available for series {SERIES}")));
            }
        }
        if let Some(dir) = kernel.modules.as_ref().filter(|dir| !dir.join("Kbuild").is_file()) {
            bail!(Usage(format!("--modules: directory '{}' has no file Kbuild", dir.display())));
        }
        self.need_packages("to fetch and unpack the kernel source", &["xz-utils", "patch"])?;
        let package = self.fetch_deb(&format!("linux-source-{series}"))?;
        let patches = (!kernel.stock).then_some(patches);
        let base = match (kernel.debian, kernel.deb) {
            (true, _) => Some(without_modules(&self.debian_configuration(Flavour::Standard)?)),
            (_, true) => Some(self.debian_configuration(Flavour::Cloud)?),
            _ => None,
        };
        Ok(Inputs {
            package,
            base,
            fragments: fragments(&self.checkout.join("guest/config"), kernel, &series)?,
            patches,
            part: kernel.part,
            modules: kernel.modules.clone(),
            deb: kernel.deb,
            series,
            architecture: if kernel.arm64 { &ARM64 } else { &X86_64 },
        })
    }

    /// Returns Debian's configuration of the series.
    fn debian_configuration(&self, flavour: Flavour) -> Result<String> {
        let dir = self.debian_kernel(flavour)?;
        let (_, release) = packaged_kernel(&dir)?;
        read(&dir.join(format!("boot/config-{release}")))
    }

    fn kernel_key(&self, inputs: &Inputs) -> Result<String> {
        // When a change to this code changes the built kernels, increase this number.
        let mut key = Key::default().text(inputs.version()).text(inputs.variant()).text("recipe 1");
        if let Some(base) = &inputs.base {
            key = key.text(base);
        }
        for fragment in &inputs.fragments {
            key = key.path(fragment)?;
        }
        if let Some(patches) = &inputs.patches {
            key = key.path(&self.checkout.join("guest/src"))?.path(patches)?;
        }
        if let (Some(patches), Some(part)) = (&inputs.patches, inputs.part) {
            key = key.text(&format!("part {part:?}"));
            for list in ["files", "later", "parts"] {
                key = key.path(&patches.with_file_name(list))?;
            }
        }
        if let Some(modules) = &inputs.modules {
            key = key.path(modules)?;
        }
        if inputs.deb {
            // When a change to `deb.rs` changes the packages, increase this number.
            key = key.text("packages 1");
        }
        Ok(key.finish())
    }

    fn built(&self, key: &str) -> PathBuf {
        self.cache.join("guest-kernel").join(key)
    }

    /// Calls `act` with the source tree and the directory of work trees. No other process uses the tree meanwhile.
    fn in_tree<T>(&self, inputs: &Inputs, act: impl FnOnce(&Path, &Path) -> Result<T>) -> Result<T> {
        let pristine = self.cached("linux-source", inputs.version(), |dir| {
            self.progress.show("unpacking the kernel source");
            let archive = inputs.package.join(format!("usr/src/linux-source-{}.tar.xz", inputs.series));
            self.run(Command::new("tar").arg("-C").arg(dir).args(["--strip-components=1", "-xf"]).arg(archive))
        })?;
        let work = self.cache.join("linux-work").join(inputs.version());
        fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
        let lock = work.join(format!(".lock-{}", inputs.variant()));
        let _lock = self.lock(&lock, "waiting for another build of a kernel")?;
        match &inputs.patches {
            None => act(&pristine, &work),
            Some(patches) => {
                let tree = work.join(inputs.variant());
                self.patched_tree(&pristine, &tree, patches, inputs.part)?;
                act(&tree, &work)
            }
        }
    }

    /// Returns the name of the build directory. The name depends on the fragments' names, but not on their contents or this checkout's
    /// path. If an option changes, make therefore compiles only the files that depend on this option.
    fn out_name(&self, inputs: &Inputs) -> String {
        let names = inputs.fragments.iter().map(|file| file.strip_prefix(&self.checkout).unwrap_or(file));
        let key = names.fold(Key::default(), |key, name| key.text(&name.to_string_lossy())).finish();
        format!("{}-{}", inputs.variant(), &key[..8])
    }
}

impl Inputs {
    fn version(&self) -> &str {
        self.package.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    fn variant(&self) -> &'static str {
        match (&self.patches, self.part) {
            // The packages take long to build. In a tree of their own, they do not delay builds of other kernels.
            _ if self.deb => "deb",
            (None, _) => "stock",
            (Some(_), None) => "patched",
            // All parts use one tree. Files that are equal in two parts then stay unchanged, and make does not compile them again.
            (Some(_), Some(_)) => "part",
        }
    }
}

/// Returns the directory of a series' hooks.
///
/// # Errors
/// Fails if the series has no hooks.
pub(crate) fn patches_of(checkout: &Path, series: &str) -> Result<PathBuf> {
    let patches = checkout.join("guest/patches").join(series);
    let is_name = series.chars().all(|c| c.is_ascii_digit() || c == '.');
    if !is_name || !patches.join("series").is_file() {
        bail!(Usage(format!(
            "--series '{series}': there is no guest/patches/{series}; name a directory of guest/patches"
        )));
    }
    Ok(patches)
}

/// Returns the configuration fragments in this order: the base fragment `6.12`, the fragment of a newer series if the file exists, and the
/// fragments that the options select. A kernel for arm64 gets only the fragment `arm64` and the files of `--config`. Packages get only the
/// fragment `deb` and the files of `--config`.
fn fragments(directory: &Path, kernel: &GuestKernel, series: &str) -> Result<Vec<PathBuf>> {
    let named = |name: &str| directory.join(format!("{name}.config"));
    let if_there = |name: &str| Some(named(name)).filter(|file| file.exists());
    if kernel.arm64 || kernel.deb {
        let own = kernel
            .config
            .iter()
            .map(|file| fs::canonicalize(file).with_context(|| format!("--config: {}", file.display())));
        return [Ok(named(if kernel.deb { "deb" } else { "arm64" }))].into_iter().chain(own).collect();
    }
    let mut all = vec![named(SERIES)];
    if series != SERIES {
        all.extend(if_there(series));
    }
    if kernel.debug {
        all.push(named("debug"));
        all.extend(if_there(&format!("debug-{series}")));
    }
    for file in &kernel.config {
        all.push(fs::canonicalize(file).with_context(|| format!("--config: {}", file.display()))?);
    }
    if !kernel.stock {
        all.push(named("bounce"));
    }
    if kernel.profile {
        all.push(named("profile"));
    }
    if kernel.modules.is_some() {
        all.push(named("modules"));
    }
    if kernel.debian {
        all.push(named("debian"));
    }
    Ok(all)
}

/// Returns a configuration without the options that are modules.
fn without_modules(config: &str) -> String {
    config.lines().filter(|line| !line.ends_with("=m")).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{assert_refused, parse, with_tools};

    #[test]
    fn packages_are_refused_for_other_kernels() {
        let check = |options: &Options| {
            with_tools(&crate::checkout(), "/nonexistent".as_ref(), |tools| tools.inputs(&options.kernel).map(|_| ()))
        };
        let refused = "cannot be used with";
        let uses: [(&[&str], &str); 8] = [
            (&["--deb", "--series", "7.3"], "--deb: only available for series 6.12"),
            (&["--deb", "--stock"], refused),
            (&["--deb", "--part", "A"], refused),
            (&["--deb", "--profile"], refused),
            (&["--deb", "--debug"], refused),
            (&["--deb", "--debian"], refused),
            (&["--deb", "--arm64"], refused),
            (&["--deb", "--modules", "."], refused),
        ];
        assert_refused(&uses, check);
        assert!(parse(&["--deb", "--series", "6.12", "--print-path"], |_: &Options| Ok(())).is_ok());
    }

    #[test]
    fn configuration_without_modules_keeps_other_lines() {
        let config = "CONFIG_A=y\nCONFIG_B=m\n# CONFIG_C is not set\nCONFIG_D=\"m\"\n";
        assert_eq!(without_modules(config), "CONFIG_A=y\n# CONFIG_C is not set\nCONFIG_D=\"m\"\n");
    }

    #[test]
    fn fragments_keep_their_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["6.12", "7.3", "deb", "debian", "debug", "debug-6.12", "bounce", "profile", "modules", "own"] {
            fs::write(dir.path().join(format!("{name}.config")), "").unwrap();
        }
        let own = fs::canonicalize(dir.path().join("own.config")).unwrap();
        let names = |kernel: &GuestKernel, series: &str| {
            let files = fragments(dir.path(), kernel, series).unwrap();
            files.iter().map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let plain = GuestKernel::default();
        assert_eq!(names(&plain, "6.12"), ["6.12", "bounce"]);
        assert_eq!(names(&plain, "7.3"), ["6.12", "7.3", "bounce"]);
        let all = GuestKernel { debug: true, profile: true, config: vec![own.clone()], ..plain.clone() };
        assert_eq!(names(&all, "6.12"), ["6.12", "debug", "debug-6.12", "own", "bounce", "profile"]);
        assert_eq!(names(&all, "7.3"), ["6.12", "7.3", "debug", "own", "bounce", "profile"]);
        let debian = GuestKernel { debian: true, config: vec![own.clone()], ..plain.clone() };
        assert_eq!(names(&debian, "6.12"), ["6.12", "own", "bounce", "debian"]);
        let arm64 = GuestKernel { arm64: true, config: vec![own.clone()], ..plain.clone() };
        assert_eq!(names(&arm64, "7.3"), ["arm64", "own"]);
        let deb = GuestKernel { deb: true, config: vec![own.clone()], ..plain.clone() };
        assert_eq!(names(&deb, "6.12"), ["deb", "own"]);
        let modular = GuestKernel { stock: true, modules: Some("m".into()), ..plain.clone() };
        assert_eq!(names(&modular, "6.12"), ["6.12", "modules"]);
        assert_eq!(names(&GuestKernel { stock: true, config: vec![own], ..plain }, "6.12"), ["6.12", "own"]);
    }
}
