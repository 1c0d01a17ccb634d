// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! State that all tools share: the checkout, the cache, messages and signals.

use std::env;
use std::error::Error;
use std::fmt;
use std::fs::{self, File};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::progress::Progress;
use crate::signals::Signals;

/// Returns the top of the checkout: `CAROM_ROOT`, which the scripts set, or the directory where this program was built.
#[must_use]
pub fn checkout() -> PathBuf {
    env::var_os("CAROM_ROOT").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), PathBuf::from)
}

/// Error in the user's options or environment variables. The exit status is then 2.
#[derive(Debug)]
pub struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// Builder of the files that guests and the rig need. The files are in the cache.
#[derive(Debug)]
pub struct Tools<'a> {
    pub(crate) checkout: PathBuf,
    pub(crate) cache: PathBuf,
    pub(crate) signals: &'a Signals,
    pub(crate) progress: &'a Progress,
    /// File for the output of programs. `None` for this program's stdout and stderr.
    pub(crate) output: Option<File>,
}

impl<'a> Tools<'a> {
    /// Creates the tools for this checkout and this user's cache. If the cache directory is missing, creates it.
    ///
    /// # Errors
    /// Fails if the cache cannot be created, or if no environment variable gives the place of the cache.
    pub fn new(signals: &'a Signals, progress: &'a Progress) -> Result<Self> {
        let cache = cache_place(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))?;
        fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let cache = std::path::absolute(&cache).with_context(|| cache.display().to_string())?;
        Ok(Self { checkout: checkout(), cache, signals, progress, output: None })
    }

    /// Returns tools that differ from `self` only in one point: they write the output of programs to the file `output`.
    pub(crate) fn with_output(&self, output: File) -> Self {
        let (checkout, cache) = (self.checkout.clone(), self.cache.clone());
        Self { checkout, cache, signals: self.signals, progress: self.progress, output: Some(output) }
    }

    /// Prints a text to the place of the programs' output: to the file `output`, or to stdout if there is no such file.
    pub(crate) fn print(&self, text: &str) {
        // A failed write does no harm.
        let _ = match &self.output {
            Some(file) => {
                let mut file: &File = file;
                file.write_all(text.as_bytes())
            }
            None => stdout().write_all(text.as_bytes()),
        };
    }

    /// Fails if a signal has asked this program to end.
    pub(crate) fn go_on(&self) -> Result<()> {
        match self.signals.caught() {
            Some(_) => bail!("interrupted"),
            None => Ok(()),
        }
    }
}

fn cache_place(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
    variable("CAROM_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("carom")))
        .or_else(|| Some(variable("HOME")?.join(".cache/carom")))
        .context("no directory for the cache: set CAROM_CACHE")
}

/// Calls `test` with tools for this checkout and cache.
#[cfg(test)]
pub(crate) fn with_tools<T>(checkout: &Path, cache: &Path, test: impl FnOnce(&Tools) -> T) -> T {
    let (signals, progress) = (Signals::default(), Progress::new("test"));
    test(&Tools {
        checkout: checkout.into(),
        cache: cache.into(),
        signals: &signals,
        progress: &progress,
        output: None,
    })
}

/// Parses and checks a script's options, for a test.
#[cfg(test)]
pub(crate) fn parse<O: clap::Args>(words: &[&str], check: impl FnOnce(&O) -> Result<()>) -> Result<O, String> {
    let command = O::augment_args(clap::Command::new("script").no_binary_name(true));
    let options = command.try_get_matches_from(words).and_then(|matches| O::from_arg_matches(&matches));
    let options = options.map_err(|error| error.to_string())?;
    check(&options).map(|()| options).map_err(|error| format!("{error:#}"))
}

/// Asserts that each of these uses of a script fails with its reason, in parsing or in `check`.
#[cfg(test)]
pub(crate) fn assert_refused<O: clap::Args + fmt::Debug>(uses: &[(&[&str], &str)], check: impl Fn(&O) -> Result<()>) {
    for (words, reason) in uses {
        let said = parse(words, &check).unwrap_err();
        assert!(said.contains(reason), "{words:?}: {said}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_variable_overrides_the_default_cache() {
        let place =
            |set: &[&str]| cache_place(|name| set.contains(&name).then(|| PathBuf::from(format!("/{name}")))).ok();
        assert_eq!(place(&["CAROM_CACHE", "XDG_CACHE_HOME", "HOME"]), Some("/CAROM_CACHE".into()));
        assert_eq!(place(&["XDG_CACHE_HOME", "HOME"]), Some("/XDG_CACHE_HOME/carom".into()));
        assert_eq!(place(&["HOME"]), Some("/HOME/.cache/carom".into()));
        assert_eq!(place(&[]), None);
    }
}
