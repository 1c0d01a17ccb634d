// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/guest-series`: the guest patch as one series of mails, made in a repository of the files that it changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::kernel::{GuestKernel, changed_files, patch_name, patches_of};
use crate::key::files_below;
use crate::tools::{Tools, Usage};

/// What is to be written.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The kernel series.
    #[arg(long, value_name = "N", default_value = "6.12")]
    pub(crate) series: String,
    /// Also apply it to Debian's source.
    #[arg(long)]
    pub(crate) check: bool,
    /// Directory for the mails.
    pub(crate) directory: PathBuf,
}

/// A commit of the series.
enum Part {
    /// Files of `guest/src` whose names start with one of these, but for those that are there already.
    Files { subject: &'static str, body: &'static str, starts: &'static [&'static str] },
    /// The hooks that this is true of.
    Hooks(fn(&str) -> bool),
    /// Our entry in MAINTAINERS, which the next commit of files has.
    Maintainers,
}

const PARTS: [Part; 9] = [
    // Mends of mainline, which stand alone, and the attributes.
    Part::Hooks(|name| number(name) <= "0004"),
    Part::Files {
        subject: "iommu/dma: Add an allocator of bounce slots",
        body: "Chunks of memory, each cut into slots of one power-of-two size, in front of which each CPU keeps a few. It is not built
yet. It also compiles in user space, to be tested under sanitizers.",
        starts: &["drivers/iommu/dma-bounce-slots."],
    },
    Part::Files {
        subject: "iommu/dma: Add pools of bounce memory",
        body: "A pool for each DMA domain, with its provider of memory: the kernel's own pages, or what the IOMMU driver offers. It
decides which mappings bounce and copies what has to be copied. It is not built yet.",
        starts: &[
            "include/linux/dma-bounce.h",
            "include/trace/events/dma_bounce.h",
            "drivers/iommu/dma-bounce.",
            "drivers/iommu/dma-bounce-map.",
            "drivers/iommu/dma-bounce-copy.c",
            "drivers/iommu/dma-bounce-pool.",
            "drivers/iommu/dma-bounce-share.c",
            "drivers/iommu/dma-bounce-pages.c",
            "drivers/iommu/dma-bounce-single.c",
            "drivers/iommu/dma-bounce-request.c",
            "drivers/iommu/dma-bounce-calibrate.c",
            "drivers/iommu/dma-bounce-debugfs.c",
        ],
    },
    Part::Files {
        subject: "iommu/virtio: Add bounce windows",
        body: "The requests by which a device backs chunks of host memory and maps them, and the shared memory in which they appear. It
is not built yet.",
        starts: &["include/uapi/linux/virtio_iommu_window.h", "drivers/iommu/virtio-iommu-window."],
    },
    Part::Files {
        subject: "iommu/dma: Add tests of bounced DMA",
        body: "KUnit tests with an IOMMU and a device that are made of software, and a driver that has QEMU's edu device witness each
byte. They are not built yet.",
        starts: &["drivers/iommu/dma-bounce-", "drivers/iommu/virtio-iommu-window-kunit.c", "drivers/iommu/bounce."],
    },
    Part::Hooks(|name| number(name) > "0004" && !name.contains("-Documentation-")),
    Part::Maintainers,
    Part::Files {
        subject: "Documentation: Describe the bouncing of small DMA",
        body: "For drivers, administrators and IOMMU drivers.",
        starts: &["Documentation/core-api/dma-bounce.rst", "Documentation/ABI/testing/sysfs-devices-iommu-bounce"],
    },
    Part::Hooks(|name| name.contains("-Documentation-")),
];

/// The number that a patch's name starts with.
fn number(name: &str) -> &str {
    name.split('-').next().unwrap_or_default()
}

/// The entry in MAINTAINERS that ours stands before.
const NEXT_ENTRY: &str = "DMA BUFFER SHARING FRAMEWORK";

/// What `git format-patch` leaves in a cover letter.
const SUBJECT: &str = "*** SUBJECT HERE ***";
const BLURB: &str = "*** BLURB HERE ***";

const NAME: &str = "Carom maintainers";
const MAIL: &str = "maintainers@carom.invalid";
const DATE: &str = "2026-11-21T12:00:00Z";

/// The repository in which the series is made.
struct Repository<'a> {
    tools: &'a Tools<'a>,
    directory: PathBuf,
    /// Debian's source.
    pristine: PathBuf,
    source: PathBuf,
    patches: PathBuf,
    hooks: Vec<String>,
}

impl Tools<'_> {
    /// Writes the series.
    ///
    /// # Errors
    /// It cannot be made or does not apply, the directory exists, or a signal came.
    pub fn guest_series(&self, options: &Options) -> Result<()> {
        let target = &options.directory;
        if target.exists() {
            bail!(Usage(format!("'{}' exists already", target.display())));
        }
        let patches = patches_of(&self.checkout, &options.series)?;
        self.need_command("git", "git", "making patches")?;
        let series = Some(options.series.clone());
        let pristine = self.kernel_source(&GuestKernel { series, stock: true, ..GuestKernel::default() })?;
        let tmp = tempfile::tempdir().context("making a directory")?;
        let repository = Repository {
            tools: self,
            directory: tmp.path().join("repo"),
            pristine,
            source: self.checkout.join("guest/src"),
            hooks: read(&patches.join("series"))?.lines().filter_map(patch_name).map(String::from).collect(),
            patches,
        };
        let out = tmp.path().join("out");
        let count = repository.make(&out, &self.checkout.join("guest/patches"))?;
        if options.check {
            repository.check(&out, &options.series)?;
        }
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        }
        self.run(Command::new("cp").arg("-r").arg(&out).arg(target))?;
        self.progress.say(&format!("{count} patches and a cover letter are in {}", target.display()));
        Ok(())
    }
}

impl Repository<'_> {
    /// Leaves the mails in `out`; returns how many patches they are. `texts` has the entry for MAINTAINERS and the cover letter.
    fn make(&self, out: &Path, texts: &Path) -> Result<usize> {
        self.base()?;
        for part in &PARTS {
            match part {
                Part::Files { subject, body, starts } => self.add_files(subject, body, starts)?,
                Part::Hooks(is_it) => {
                    for name in self.hooks.iter().filter(|name| is_it(name)) {
                        self.tools.run(self.git().args(["am", "-q"]).arg(self.patches.join(name)))?;
                    }
                }
                Part::Maintainers => {
                    let file = self.directory.join("MAINTAINERS");
                    write(&file, &with_entry(&read(&file)?, &read(&texts.join("MAINTAINERS"))?)?)?;
                }
            }
        }
        for file in self.sources()? {
            ensure!(
                self.directory.join(&file).exists(),
                "{} of guest/src is in no patch of the series",
                file.display()
            );
        }
        let root = self.tools.output(self.git().args(["rev-list", "--max-parents=0", "HEAD"]))?;
        let mut format = self.git();
        format
            .args(["format-patch", "-q", "--zero-commit", "--signature=", "--cover-letter", "-o"])
            .arg(out)
            .arg(root.trim());
        self.tools.run(&mut format)?;
        let mut names = Vec::new();
        for (file, _) in files_below(out)? {
            let name = file.to_string_lossy().into_owned();
            if name.ends_with(".patch") && !name.starts_with("0000-") {
                names.push(name);
            }
        }
        names.sort();
        write(&out.join("series"), &names.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        let cover = out.join("0000-cover-letter.patch");
        write(&cover, &with_text(&read(&cover)?, &read(&texts.join("cover-letter.txt"))?))?;
        Ok(names.len())
    }

    /// Begins with the mainline files that the series changes.
    fn base(&self) -> Result<()> {
        let mut files = BTreeSet::from(["MAINTAINERS".to_owned()]);
        for name in &self.hooks {
            files.extend(changed_files(&read(&self.patches.join(name))?).map(String::from));
        }
        self.tools.run(Command::new("git").args(["init", "-q"]).arg(&self.directory))?;
        for file in files {
            copy(&self.pristine.join(&file), &self.directory.join(&file))?;
        }
        self.commit(&["-qm", "base"])
    }

    fn add_files(&self, subject: &str, body: &str, starts: &[&str]) -> Result<()> {
        for file in self.sources()? {
            let target = self.directory.join(&file);
            let is_it = starts.iter().any(|start| file.to_string_lossy().starts_with(start));
            if is_it && !target.exists() {
                copy(&self.source.join(&file), &target)?;
            }
        }
        self.commit(&["-qs", "-m", subject, "-m", body])
    }

    /// Applies the series to Debian's source by each tool, and compares what comes of it with our files.
    fn check(&self, out: &Path, series: &str) -> Result<()> {
        self.tools.need_packages("checking that the series applies", &["quilt"])?;
        let mails = read(&out.join("series"))?;
        for tool in ["git", "quilt"] {
            fs::remove_dir_all(&self.directory).context("removing the repository")?;
            self.base()?;
            if tool == "git" {
                self.tools.run(self.git().args(["am", "-q"]).args(mails.lines().map(|name| out.join(name))))?;
            } else {
                let mut quilt = Command::new("quilt");
                quilt.args(["push", "-aq"]).current_dir(&self.directory).env("QUILT_PATCHES", out);
                self.tools.run_quietly(&mut quilt, &out.with_extension("log"))?;
            }
            for file in self.sources()? {
                let same = fs::read(self.directory.join(&file)).ok() == fs::read(self.source.join(&file)).ok();
                ensure!(same, "{} is not as in guest/src, applied by {tool}", file.display());
            }
            self.tools.progress.say(&format!("the series for {series} applies by {tool}"));
        }
        Ok(())
    }

    fn sources(&self) -> Result<Vec<PathBuf>> {
        let mut files: Vec<PathBuf> = files_below(&self.source)?.into_iter().map(|(file, _)| file).collect();
        files.sort();
        Ok(files)
    }

    fn commit(&self, arguments: &[&str]) -> Result<()> {
        self.tools.run(self.git().args(["add", "-A"]))?;
        self.tools.run(self.git().arg("commit").args(arguments))
    }

    /// git, which gives the same commits to everyone.
    fn git(&self) -> Command {
        let mut git = Command::new("git");
        git.arg("-C").arg(&self.directory);
        git.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_SYSTEM", "/dev/null")]);
        for who in ["AUTHOR", "COMMITTER"] {
            git.env(format!("GIT_{who}_NAME"), NAME);
            git.env(format!("GIT_{who}_EMAIL"), MAIL);
            git.env(format!("GIT_{who}_DATE"), DATE);
        }
        git
    }
}

/// MAINTAINERS with our entry where the alphabet wants it.
fn with_entry(maintainers: &str, entry: &str) -> Result<String> {
    let next = format!("\n{NEXT_ENTRY}\n");
    let at = maintainers.find(&next).context("MAINTAINERS has no place for our entry")? + 1;
    Ok([&maintainers[..at], entry, &maintainers[at..]].concat())
}

/// A cover letter with a text, whose first line is the subject.
fn with_text(cover: &str, text: &str) -> String {
    let (subject, rest) = text.split_once('\n').unwrap_or((text, ""));
    let blurb = rest.strip_prefix('\n').unwrap_or(rest);
    cover.replace(SUBJECT, subject).replace(&format!("{BLURB}\n"), blurb)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

fn copy(source: &Path, target: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let parent = target.parent().unwrap_or(target);
    fs::create_dir_all(parent)
        .and_then(|()| fs::copy(source, target))
        .and_then(|_| fs::set_permissions(target, fs::Permissions::from_mode(0o644)))
        .with_context(|| format!("copying {}", source.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_stands_before_the_next_one_of_the_alphabet() {
        let before = "A\nM: a\n\nDMA BUFFER SHARING FRAMEWORK\nM: b\n";
        let expected = "A\nM: a\n\nDMA BOUNCE\nM: c\n\nDMA BUFFER SHARING FRAMEWORK\nM: b\n";
        assert_eq!(with_entry(before, "DMA BOUNCE\nM: c\n\n").unwrap(), expected);
        assert!(with_entry("A\n", "x").is_err());
    }

    #[test]
    fn cover_letter_has_subject_and_text() {
        let cover = "Subject: [PATCH 0/2] *** SUBJECT HERE ***\n\n*** BLURB HERE ***\n\nCarom (2):\n";
        let expected = "Subject: [PATCH 0/2] Bounce\n\nText\nof two lines\n\nCarom (2):\n";
        assert_eq!(with_text(cover, "Bounce\n\nText\nof two lines\n"), expected);
    }
}
