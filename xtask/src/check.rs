// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/guest-check`: checks the guest patch as a kernel maintainer would, on Debian's source.

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

/// Check of the patch. By default, all checks run in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    Lines,
    Builds,
    Sparse,
    Code,
}

/// Selection of checks.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Kernel series.
    #[arg(long, value_name = "N", default_value = "6.12")]
    series: String,
    /// Checks to run.
    #[arg(long, value_name = "NAME")]
    only: Vec<Check>,
}

impl Tools<'_> {
    /// Runs the checks.
    ///
    /// # Errors
    /// Fails if a check fails or cannot run, or on a signal.
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

    /// Checks that the kernel builds after each patch of the mail series. After each patch, builds the objects whose sources this or an
    /// earlier patch touched.
    fn check_builds(&self, tree: &mut CheckTree, series: &str) -> Result<()> {
        let tmp = tempfile::tempdir().context("cannot create a temporary directory for the mails")?;
        let mails = tmp.path().join("series");
        self.guest_series(&series::Options { series: series.into(), check: false, directory: mails.clone() })?;
        tree.fresh()?;
        let names = fs::read_to_string(mails.join("series")).context("cannot read the list of the mails")?;
        for name in names.lines() {
            tree.apply(&mails.join(name))?;
            for mode in [Mode::On, Mode::Off] {
                self.check_build(tree, mode, series, name)?;
            }
        }
        self.check_build(tree, Mode::Bare, series, "the last patch")?;
        ensure!(
            tree.object(Mode::On, "drivers/iommu/dma-bounce-map.o").exists(),
            "the builds with bouncing on made no dma-bounce-map.o"
        );
        let count = names.lines().count();
        self.progress
            .say(&format!("{series}: each of {count} patches builds without warnings, with bouncing on and off; all patches together also build with few other kernel options"));
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
