// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Replay of the stored inputs of a fuzzer.

use std::fs;
use std::path::Path;

/// Runs `live` with each input that is stored in the directory `corpus`.
///
/// # Panics
/// Panics if `live` panics, if the directory cannot be read, or if it holds fewer than `least` inputs.
pub fn replay(corpus: impl AsRef<Path>, least: usize, live: impl Fn(&[u8])) {
    let corpus = corpus.as_ref();
    let mut count = 0;
    for entry in fs::read_dir(corpus).expect("the corpus directory exists") {
        let data = fs::read(entry.expect("the corpus directory can be listed").path())
            .expect("a file of the corpus can be read");
        live(&data);
        count += 1;
    }
    assert!(count >= least, "only {count} inputs in {}", corpus.display());
}
