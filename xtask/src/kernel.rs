// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest kernels: Debian's source with the files of `guest/src` and the hooks of `guest/patches`, small and without modules but those
//! that are asked for.

mod build;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use self::build::{ARM64, Architecture, X86_64};
use crate::key::Key;
use crate::mails::Part;
use crate::packaged_kernel::packaged_kernel;
use crate::tools::{Tools, Usage};

/// The series that is built unless another one is named.
const SERIES: &str = "6.12";

/// Which kernel.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestKernel {
    /// The kernel series; 6.12 if it is none.
    #[arg(long, value_name = "N")]
    pub series: Option<String>,
    /// Without our files and hooks.
    #[arg(long)]
    pub stock: bool,
    /// With the patches of the series up to the end of this part.
    #[arg(long, ignore_case = true, conflicts_with = "stock")]
    pub part: Option<Part>,
    /// With the function profiler.
    #[arg(long)]
    pub profile: bool,
    /// With what looks for mistakes.
    #[arg(long)]
    pub debug: bool,
    /// With Debian's configuration, of which nothing is a module.
    #[arg(long)]
    pub debian: bool,
    /// For arm64, to be emulated.
    #[arg(long, conflicts_with_all = ["stock", "part", "profile", "debug", "debian"])]
    pub arm64: bool,
    /// Configuration fragments on top.
    #[arg(long, value_name = "FRAGMENT")]
    pub config: Vec<PathBuf>,
    /// Directory of the source of modules that are built for it.
    #[arg(long, value_name = "DIR", conflicts_with = "arm64")]
    pub modules: Option<PathBuf>,
}

/// What `scripts/guest-kernel` is asked for.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    kernel: GuestKernel,
    /// Only where the result is, if it is there.
    #[arg(long)]
    print_path: bool,
    /// The source tree in place of the kernel.
    #[arg(long)]
    source: bool,
}

/// What a kernel is made from.
struct Inputs {
    /// Debian's source package, unpacked.
    package: PathBuf,
    /// A configuration below the fragments, of which the kernel may refuse what depends on something else.
    base: Option<String>,
    /// Configuration fragments, the last of which counts.
    fragments: Vec<PathBuf>,
    /// Our patches; none for a stock kernel.
    patches: Option<PathBuf>,
    /// The part of them that is the last, if it is not the series'.
    part: Option<Part>,
    /// The source of modules, if there are to be any.
    modules: Option<PathBuf>,
    series: String,
    architecture: &'static Architecture,
}

impl Tools<'_> {
    /// What `scripts/guest-kernel` prints; nothing where the path of what is not there is asked for.
    ///
    /// # Errors
    /// The kernel cannot be made, or a signal came.
    pub fn print_guest_kernel(&self, options: &Options) -> Result<Option<PathBuf>> {
        if options.print_path {
            let inputs = self.inputs(&options.kernel)?;
            return Ok(Some(self.built(&self.kernel_key(&inputs)?)).filter(|dir| dir.is_dir()));
        }
        let made =
            if options.source { self.kernel_source(&options.kernel) } else { self.guest_kernel(&options.kernel) };
        made.map(Some)
    }

    /// The directory of a kernel, with `bzImage`, `vmlinux` (ELF with a PVH entry), `config` and the modules that are wanted, or for
    /// arm64 with `Image` and `config`; built where it is missing.
    ///
    /// # Errors
    /// It cannot be made, or a signal came.
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
        self.in_tree(&inputs, |tree, work| {
            let out = work.join(self.out_name(&inputs));
            self.cached("guest-kernel", &key, |dir| self.build_kernel(tree, &out, &inputs, dir))
        })
    }

    /// A kernel's source tree, with our files and hooks unless it is a stock kernel's.
    ///
    /// # Errors
    /// As [`Tools::guest_kernel`].
    pub fn kernel_source(&self, kernel: &GuestKernel) -> Result<PathBuf> {
        self.in_tree(&self.inputs(kernel)?, |tree, _| Ok(tree.to_path_buf()))
    }

    fn inputs(&self, kernel: &GuestKernel) -> Result<Inputs> {
        let series = kernel.series.clone().unwrap_or_else(|| SERIES.into());
        let patches = patches_of(&self.checkout, &series)?;
        if let Some(file) = kernel.config.iter().find(|file| !file.is_file()) {
            bail!(Usage(format!("--config: cannot read '{}'", file.display())));
        }
        if kernel.debian && series != SERIES {
            bail!(Usage(format!("--debian: is of series {SERIES} only")));
        }
        if let Some(dir) = kernel.modules.as_ref().filter(|dir| !dir.join("Kbuild").is_file()) {
            bail!(Usage(format!("--modules: '{}' has no Kbuild", dir.display())));
        }
        self.need_packages("to fetch and unpack the kernel source", &["xz-utils", "patch"])?;
        let package = self.fetch_deb(&format!("linux-source-{series}"))?;
        let patches = (!kernel.stock).then_some(patches);
        Ok(Inputs {
            package,
            base: kernel.debian.then(|| self.debian_configuration()).transpose()?,
            fragments: fragments(&self.checkout.join("guest/config"), kernel, &series)?,
            patches,
            part: kernel.part,
            modules: kernel.modules.clone(),
            series,
            architecture: if kernel.arm64 { &ARM64 } else { &X86_64 },
        })
    }

    /// Debian's configuration of the series, without what is built as a module there.
    fn debian_configuration(&self) -> Result<String> {
        let dir = self.debian_kernel()?;
        let (_, release) = packaged_kernel(&dir)?;
        let file = dir.join(format!("boot/config-{release}"));
        let config = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(config.lines().filter(|line| !line.ends_with("=m")).flat_map(|line| [line, "\n"]).collect())
    }

    fn kernel_key(&self, inputs: &Inputs) -> Result<String> {
        // A change of how a kernel is built, rather than of what from, needs a new number here.
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
        Ok(key.finish())
    }

    fn built(&self, key: &str) -> PathBuf {
        self.cache.join("guest-kernel").join(key)
    }

    /// Calls `act` with the source tree and the directory of work trees, while no other process uses the tree.
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

    /// The build directory's name. It says which fragments there are, not what is in them, nor where this checkout is: a changed
    /// option compiles only what depends on it.
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
            (None, _) => "stock",
            (Some(_), None) => "patched",
            // One tree, in which what the parts have in common stays as it is.
            (Some(_), Some(_)) => "part",
        }
    }
}

/// The hooks of a series.
///
/// # Errors
/// There are none for it.
pub(crate) fn patches_of(checkout: &Path, series: &str) -> Result<PathBuf> {
    let patches = checkout.join("guest/patches").join(series);
    let is_name = series.chars().all(|c| c.is_ascii_digit() || c == '.');
    if !is_name || !patches.join("series").is_file() {
        bail!(Usage(format!("--series '{series}': there is no guest/patches/{series}")));
    }
    Ok(patches)
}

/// The configuration: what every kernel has, what another series wants besides, what the options ask for.
fn fragments(directory: &Path, kernel: &GuestKernel, series: &str) -> Result<Vec<PathBuf>> {
    let named = |name: &str| directory.join(format!("{name}.config"));
    let if_there = |name: &str| Some(named(name)).filter(|file| file.exists());
    if kernel.arm64 {
        let own = kernel
            .config
            .iter()
            .map(|file| fs::canonicalize(file).with_context(|| format!("--config: {}", file.display())));
        return [Ok(named("arm64"))].into_iter().chain(own).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_stand_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["6.12", "7.3", "debian", "debug", "debug-6.12", "bounce", "profile", "modules", "own"] {
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
        let modular = GuestKernel { stock: true, modules: Some("m".into()), ..plain.clone() };
        assert_eq!(names(&modular, "6.12"), ["6.12", "modules"]);
        assert_eq!(names(&GuestKernel { stock: true, config: vec![own], ..plain }, "6.12"), ["6.12", "own"]);
    }
}
