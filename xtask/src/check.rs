// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/guest-check`: looks at the guest patch the way a kernel maintainer would, on Debian's source.

mod code;
mod lines;
mod sparse;
mod tree;

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::tree::{CheckTree, Mode};
use crate::kernel::{GuestKernel, patches_of};
use crate::series;
use crate::tools::Tools;

/// A check. They run in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    Lines,
    Builds,
    Sparse,
    Code,
}

/// What is to be checked.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The kernel series.
    #[arg(long, value_name = "N", default_value = "6.12")]
    series: String,
    /// Only these checks.
    #[arg(long, value_name = "NAME")]
    only: Vec<Check>,
}

impl Tools<'_> {
    /// Runs the checks.
    ///
    /// # Errors
    /// One fails or cannot be made, or a signal came.
    pub fn guest_check(&self, options: &Options) -> Result<()> {
        let series = &options.series;
        let patches = patches_of(&self.checkout, series)?;
        self.need_packages(
            "checking the guest patch",
            &["git", "patch", "gcc", "make", "flex", "bison", "bc", "libelf-dev", "libssl-dev", "binutils"],
        )?;
        let kernel = GuestKernel { series: Some(series.clone()), stock: true, ..GuestKernel::default() };
        let pristine = self.kernel_source(&kernel)?;
        let work = self.cache.join("linux-work").join(pristine.file_name().unwrap_or_default());
        fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
        let _lock = self.lock(&work.join(".lock-check"), "waiting for another check of the guest patch")?;
        let mut tree = CheckTree::new(self, pristine, work, patches);
        let wanted = if options.only.is_empty() { Check::value_variants() } else { &options.only };
        for check in wanted {
            match check {
                Check::Lines => self.progress.say(&format!("{series}: {}", tree.check_lines()?)),
                Check::Builds => self.check_builds(&mut tree, series)?,
                Check::Sparse => self.progress.say(&format!("{series}: {}", tree.check_sparse()?)),
                Check::Code => self.progress.say(&format!("{series}: {}", tree.check_code()?)),
            }
        }
        Ok(())
    }

    /// Each patch of the mail series builds by itself: after each of them the objects that it touches.
    fn check_builds(&self, tree: &mut CheckTree, series: &str) -> Result<()> {
        let tmp = tempfile::tempdir().context("cannot create a directory")?;
        let mails = tmp.path().join("series");
        self.guest_series(&series::Options { series: series.into(), check: false, directory: mails.clone() })?;
        tree.fresh()?;
        let names = fs::read_to_string(mails.join("series")).context("cannot read the series")?;
        for name in names.lines() {
            tree.apply(&mails.join(name))?;
            for mode in [Mode::On, Mode::Off] {
                self.check_build(tree, mode, series, name)?;
            }
        }
        self.check_build(tree, Mode::Bare, series, "the last patch")?;
        ensure!(tree.object(Mode::On, "drivers/iommu/dma-bounce-map.o").exists(), "bouncing was not compiled");
        let count = names.lines().count();
        self.progress
            .say(&format!("{series}: each of {count} patches builds, with bouncing on and off, and all of them where little else is on, without warnings"));
        Ok(())
    }

    fn check_build(&self, tree: &CheckTree, mode: Mode, series: &str, after: &str) -> Result<()> {
        self.progress.show(&format!("{after}, bouncing {mode}"));
        tree.configure(mode)?;
        tree.build(mode, &["W=1"]).with_context(|| format!("{series}: after {after}, with bouncing {mode}"))?;
        let complaints = tree.complaints(mode)?;
        if !complaints.is_empty() {
            bail!("{series}: after {after} there are warnings with bouncing {mode}:\n{}", complaints.join("\n"));
        }
        Ok(())
    }
}
