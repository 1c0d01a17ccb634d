// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Static fio for guests, built from Debian's source, with engines for local disks only. Debian's own fio needs 80 MiB of
//! libraries, such as ICU's and Ceph's, which each guest would unpack at boot.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::key::Key;
use crate::tools::Tools;

/// Configuration that guests need. All other optional features are off.
const FEATURES: &str = "--build-static --disable-native --disable-tcmalloc --disable-numa --disable-rdma --disable-rados --disable-rbd \
     --disable-http --disable-gfapi --disable-pmem --disable-xnvme --disable-libzbc --disable-libnfs --disable-lex --disable-dfs";

const PACKAGES: [&str; 5] = ["gcc", "make", "libc6-dev", "libaio-dev", "zlib1g-dev"];

impl Tools<'_> {
    /// Returns the path of fio. Builds fio if it is missing.
    pub(crate) fn guest_fio(&self) -> Result<PathBuf> {
        let version = self.source_version("fio")?;
        // When a change to this code changes the built fio, increase this number.
        let key = Key::default().text(&version).text("recipe 1").text(FEATURES).finish();
        let dir = self.cached("fio", &key, |dir| self.build_fio(&version, dir))?;
        Ok(dir.join("fio"))
    }

    fn build_fio(&self, version: &str, dir: &Path) -> Result<()> {
        let (tree, log) = (dir.join("tree"), dir.join("log"));
        self.need_packages("building the guests' fio", &PACKAGES)?;
        self.progress.show(&format!("fetching fio {version}"));
        self.fetch_source("fio", version, &tree)?;
        self.progress.show(&format!("compiling fio {version}"));
        let mut configure = Command::new("./configure");
        self.run_quietly(configure.args(FEATURES.split_whitespace()).current_dir(&tree), &log)?;
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        self.run_quietly(Command::new("make").arg(format!("-j{jobs}")).arg("fio").current_dir(&tree), &log)?;
        let program = dir.join("fio");
        self.run(Command::new("strip").arg("-o").arg(&program).arg(tree.join("fio")))?;
        // If the library of an engine is missing, configure leaves out the engine without an error.
        let engines = self.output(Command::new(&program).arg("--enghelp"))?;
        ensure!(engines.split_whitespace().any(|engine| engine == "libaio"), "the built fio lacks the libaio engine");
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))
    }
}
