// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Error texts for files that would exceed the process's limit on file sizes.

use std::io;

use rustix::process::{Resource, getrlimit};

/// Ways to raise the limit.
const REMEDY: &str = "raise the limit with ulimit -f unlimited, or with LimitFSIZE=infinity in a systemd unit";

/// Returns a hint to append to an error's text. The hint is empty unless the error is EFBIG. Unlike [`explain`], this function does not
/// call getrlimit(2), which some thread roles do not allow.
pub fn hint(error: &io::Error) -> &'static str {
    if error.raw_os_error() != Some(libc::EFBIG) {
        return "";
    }
    " (the file would exceed RLIMIT_FSIZE or the limit of its file system; see ulimit -f, or LimitFSIZE= in a systemd unit)"
}

/// If `error` is EFBIG, adds the limit, and the ways to raise it, to the error's text. Returns any other error unchanged.
///
/// The calling thread's role must allow getrlimit(2).
pub fn explain(error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(libc::EFBIG) {
        return error;
    }
    explain_with(error, getrlimit(Resource::Fsize).current)
}

fn explain_with(error: io::Error, limit: Option<u64>) -> io::Error {
    match limit {
        Some(limit) => {
            let text = format!("{error}; the limit on the size of files (RLIMIT_FSIZE) is {limit} bytes; {REMEDY}");
            io::Error::new(error.kind(), text)
        }
        // RLIMIT_FSIZE is unlimited, so the file would exceed the limit of its file system.
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_limit_and_its_remedy() {
        let too_big = || io::Error::from_raw_os_error(libc::EFBIG);
        let explained = explain_with(too_big(), Some(4096));
        assert_eq!(explained.kind(), io::ErrorKind::FileTooLarge);
        let text = explained.to_string();
        assert!(text.contains("(RLIMIT_FSIZE) is 4096 bytes") && text.contains("LimitFSIZE="), "{text}");
        assert_eq!(explain_with(too_big(), None).to_string(), too_big().to_string());
        assert!(hint(&too_big()).contains("RLIMIT_FSIZE"));
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let full = explain(io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!((full.raw_os_error(), hint(&full)), (Some(libc::ENOSPC), ""));
    }
}
