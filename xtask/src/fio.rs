// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! fio for guests, from Debian's source: static, and with the engines of a local disk only. Debian's own program needs 80 MiB of
//! libraries, ICU's and Ceph's among them, which each guest would have to unpack before it begins.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::key::Key;
use crate::tools::Tools;

/// What guests need, and nothing else that is optional.
const FEATURES: &str = "--build-static --disable-native --disable-tcmalloc --disable-numa --disable-rdma --disable-rados --disable-rbd \
     --disable-http --disable-gfapi --disable-pmem --disable-xnvme --disable-libzbc --disable-libnfs --disable-lex --disable-dfs";

const PACKAGES: [&str; 5] = ["gcc", "make", "libc6-dev", "libaio-dev", "zlib1g-dev"];

impl Tools<'_> {
    /// The program, built where it is missing.
    pub(crate) fn guest_fio(&self) -> Result<PathBuf> {
        let version = self.source_version("fio")?;
        // A change of how it is built needs another number here.
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
        // Engines that lack their library are left out without a word.
        let engines = self.output(Command::new(&program).arg("--enghelp"))?;
        ensure!(engines.split_whitespace().any(|engine| engine == "libaio"), "the fio that was built has no libaio");
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))
    }
}
