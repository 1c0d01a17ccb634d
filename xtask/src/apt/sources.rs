// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Package sources for apt. The environment or the machine's apt configuration names the Debian mirrors.

use std::env;
use std::process::Command;

use anyhow::{Context, Result};

use super::{BACKPORTS, KEYRING, Lists, SUITE, UNSTABLE};
use crate::tools::Tools;

/// Backports of the next release. They have packages that no other suite has, such as the source of newer kernels.
const NEWER: &str = "trixie-backports";

/// Addresses of Debian's archives.
#[derive(Debug, PartialEq, Eq)]
struct Mirrors {
    archive: String,
    security: Option<String>,
}

impl Tools<'_> {
    /// Returns the text of the generated `sources.list`.
    pub(super) fn apt_sources(&self, lists: Lists) -> Result<String> {
        let mirrors = self.mirrors()?;
        Ok(match lists {
            Lists::Stable => lines(&mirrors),
            Lists::Unstable => line("deb", &mirrors.archive, UNSTABLE),
        })
    }

    /// Returns the lines of a guest's `sources.list`: the suite, its updates and its security archive.
    pub(crate) fn guest_sources(&self) -> Result<String> {
        Ok(guest_lines(&self.mirrors()?))
    }

    fn mirrors(&self) -> Result<Mirrors> {
        Ok(match variable("CAROM_DEBIAN_MIRROR") {
            Some(archive) => {
                let security =
                    variable("CAROM_DEBIAN_SECURITY_MIRROR").unwrap_or_else(|| format!("{archive}-security"));
                Mirrors { archive, security: Some(security) }
            }
            None => {
                let mut ask = Command::new("apt-get");
                ask.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]);
                mirrors(&self.output(&mut ask)?).context(
                    "apt's configuration names no Debian mirror; set CAROM_DEBIAN_MIRROR to one (http://HOST/debian)",
                )?
            }
        })
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty()).map(|value| value.trim_end_matches('/').to_owned())
}

/// Finds Debian's mirrors in `addresses`. This text lists the addresses of all archives that apt uses, one per line.
fn mirrors(addresses: &str) -> Option<Mirrors> {
    let mut addresses: Vec<&str> = addresses.lines().map(|line| line.trim().trim_end_matches('/')).collect();
    addresses.sort_unstable();
    let ending = |end: &str| addresses.iter().find(|address| address.ends_with(end)).map(|address| (*address).into());
    Some(Mirrors { archive: ending("/debian")?, security: ending("/debian-security") })
}

fn line(kind: &str, uri: &str, suite: &str) -> String {
    format!("{kind} [arch=amd64 signed-by={KEYRING}] {uri} {suite} main\n")
}

fn guest_lines(mirrors: &Mirrors) -> String {
    let Mirrors { archive, security } = mirrors;
    let mut lines = line("deb", archive, SUITE) + &line("deb", archive, "bookworm-updates");
    if let Some(security) = security {
        lines += &line("deb", security, "bookworm-security");
    }
    lines
}

fn lines(mirrors: &Mirrors) -> String {
    let Mirrors { archive, security } = mirrors;
    let mut lines = String::new();
    for suite in [SUITE, "bookworm-updates", BACKPORTS, NEWER] {
        lines += &line("deb", archive, suite);
    }
    if let Some(security) = security {
        lines += &line("deb", security, "bookworm-security");
    }
    for suite in [SUITE, BACKPORTS] {
        lines += &line("deb-src", archive, suite);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_are_found_among_other_addresses() {
        let addresses = "http://m/debian/\nhttps://dl/other\nhttp://m/debian-security/\nhttp://m/debian/\n";
        let found = Mirrors { archive: "http://m/debian".into(), security: Some("http://m/debian-security".into()) };
        assert_eq!(mirrors(addresses), Some(found));
        assert_eq!(mirrors("http://m/debian\n").unwrap().security, None);
        assert_eq!(mirrors("http://m/ubuntu\n"), None);
    }

    #[test]
    fn sources_have_each_suite_and_security_only_with_a_mirror() {
        let lines = lines(&Mirrors { archive: "http://m/debian".into(), security: None });
        assert!(
            lines.contains("] http://m/debian bookworm main\n")
                && lines.contains("] http://m/debian trixie-backports main\n")
        );
        assert!(
            lines.ends_with(&format!(
                "deb-src [arch=amd64 signed-by={KEYRING}] http://m/debian bookworm-backports main\n"
            ))
        );
        assert!(!lines.contains("security main"));
    }

    #[test]
    fn guest_sources_have_the_suite_updates_and_security() {
        let (archive, security) = ("http://m/debian".into(), Some("http://m/debian-security".into()));
        let lines = guest_lines(&Mirrors { archive, security });
        let suites: Vec<&str> = lines.lines().filter_map(|line| line.rsplit(' ').nth(1)).collect();
        assert_eq!(suites, [SUITE, "bookworm-updates", "bookworm-security"]);
    }
}
