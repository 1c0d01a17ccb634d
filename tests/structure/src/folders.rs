// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Imports between the folders directly below a crate's root. A file there stands for itself, and for the folder of its name.

use std::path::{Path, PathBuf};

use crate::imports::{Ties, references};
use crate::source::Crate;

/// Imports between the folders of `krate`, except those of tests.
pub(crate) fn imports(krate: &Crate) -> Ties {
    let mut ties = Ties::new();
    let Some(root) = krate.modules.first().map(|module| &module.file) else { return ties };
    let below = root.parent().unwrap_or(Path::new(""));
    for (importer, source, name) in references(krate) {
        if krate.modules[importer].for_tests {
            continue;
        }
        let folders = [importer, source].map(|module| folder(root, below, &krate.modules[module].file));
        if let [Some(from), Some(to)] = folders
            && from != to
        {
            ties.entry((from, to)).or_default().insert(name);
        }
    }
    ties
}

/// Folder directly below `below` that holds `file`. `None` for the file `root` of the crate.
fn folder(root: &Path, below: &Path, file: &Path) -> Option<PathBuf> {
    let first = file.strip_prefix(below).ok()?.components().next()?;
    (file != root).then(|| below.join(first).with_extension(""))
}
