// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Imports between the folders directly below a crate's root folder. A file directly below the root folder belongs to the folder
//! with the same name.

use std::path::{Path, PathBuf};

use crate::imports::{Ties, references};
use crate::source::Crate;

/// Returns the imports between the folders of `krate`, except imports by tests.
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

/// Returns the folder directly below `below` that holds `file`. Returns `None` for the crate's root file `root`.
fn folder(root: &Path, below: &Path, file: &Path) -> Option<PathBuf> {
    let first = file.strip_prefix(below).ok()?.components().next()?;
    (file != root).then(|| below.join(first).with_extension(""))
}
