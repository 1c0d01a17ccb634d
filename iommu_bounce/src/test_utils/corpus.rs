// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Replaying what fuzzing has found worth keeping.

use std::fs;
use std::path::Path;

/// Lives through each input that is stored in the directory `corpus`.
///
/// # Panics
/// When `live` does, the directory cannot be read, or it holds fewer than `least` inputs.
pub fn replay(corpus: impl AsRef<Path>, least: usize, live: impl Fn(&[u8])) {
    let corpus = corpus.as_ref();
    let mut count = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is there") {
        let data = fs::read(entry.expect("it can be listed").path()).expect("it can be read");
        live(&data);
        count += 1;
    }
    assert!(count >= least, "only {count} inputs in {}", corpus.display());
}
