// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What all tools share: the checkout, the cache, messages and signals.

use std::env;
use std::error::Error;
use std::fmt;
use std::fs::{self, File};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::progress::Progress;
use crate::signals::Signals;

/// Top of the checkout: `CAROM_ROOT`, which the scripts set, else where this was built.
#[must_use]
pub fn checkout() -> PathBuf {
    env::var_os("CAROM_ROOT").map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), PathBuf::from)
}

/// The caller's mistake: exit status 2.
#[derive(Debug)]
pub struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// Makes what guests and the rig need, in the cache.
#[derive(Debug)]
pub struct Tools<'a> {
    pub(crate) checkout: PathBuf,
    pub(crate) cache: PathBuf,
    pub(crate) signals: &'a Signals,
    pub(crate) progress: &'a Progress,
    /// Where goes what programs show, if not to this program's stdout and stderr.
    pub(crate) output: Option<File>,
}

impl<'a> Tools<'a> {
    /// For this checkout and this user's cache, which is made where it is missing.
    ///
    /// # Errors
    /// The cache cannot be made, or there is no place for it.
    pub fn new(signals: &'a Signals, progress: &'a Progress) -> Result<Self> {
        let cache = cache_place(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))?;
        fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let cache = std::path::absolute(&cache).with_context(|| cache.display().to_string())?;
        Ok(Self { checkout: checkout(), cache, signals, progress, output: None })
    }

    /// The same, with what programs show in a file.
    pub(crate) fn with_output(&self, output: File) -> Self {
        let (checkout, cache) = (self.checkout.clone(), self.cache.clone());
        Self { checkout, cache, signals: self.signals, progress: self.progress, output: Some(output) }
    }

    /// Shows a text beside what programs show.
    pub(crate) fn print(&self, text: &str) {
        // Nothing is lost where it cannot be written.
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
        .context("no place for the cache: set CAROM_CACHE")
}

/// Gives a test tools for this checkout and cache.
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

/// Parses a script's options for a test, and checks them.
#[cfg(test)]
pub(crate) fn parse<O: clap::Args>(words: &[&str], check: impl FnOnce(&O) -> Result<()>) -> Result<O, String> {
    let command = O::augment_args(clap::Command::new("script").no_binary_name(true));
    let options = command.try_get_matches_from(words).and_then(|matches| O::from_arg_matches(&matches));
    let options = options.map_err(|error| error.to_string())?;
    check(&options).map(|()| options).map_err(|error| format!("{error:#}"))
}

/// Fails unless each of these uses of a script is refused for its reason, by its options or by `check`.
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
    fn cache_is_where_its_own_variable_says_before_others() {
        let place =
            |set: &[&str]| cache_place(|name| set.contains(&name).then(|| PathBuf::from(format!("/{name}")))).ok();
        assert_eq!(place(&["CAROM_CACHE", "XDG_CACHE_HOME", "HOME"]), Some("/CAROM_CACHE".into()));
        assert_eq!(place(&["XDG_CACHE_HOME", "HOME"]), Some("/XDG_CACHE_HOME/carom".into()));
        assert_eq!(place(&["HOME"]), Some("/HOME/.cache/carom".into()));
        assert_eq!(place(&[]), None);
    }
}
