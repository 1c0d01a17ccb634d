// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host directories that are hidden in the emulated machine and must be bind-mounted there.
//!
//! The machine's root is the host's root, but the machine has its own file systems on `/tmp`, `/run` and `/dev/shm`
//! (`scripts/lib/rig-init`). A checkout, a target directory or a cache in these directories is bound to the same path in the
//! machine.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};

/// Directories of the host that the machine replaces by its own file systems.
const OWN: [&str; 3] = ["/tmp", "/run", "/dev/shm"];

/// Bind mount of a host path in the machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bind {
    /// Path in the machine.
    pub(super) target: PathBuf,
    /// Path on the host, without symbolic links.
    pub(super) source: PathBuf,
}

/// Returns the bind mounts that make `paths` visible in the machine, both as written and with symbolic links resolved. Leaves
/// out missing paths, and paths that another bind mount already makes visible.
pub(super) fn binds(paths: &[PathBuf]) -> Vec<Bind> {
    let mut binds = Vec::new();
    for path in paths {
        let Ok(source) = fs::canonicalize(path) else { continue };
        let Ok(written) = std::path::absolute(path) else { continue };
        let targets = [without_dots(&written), source.clone()];
        binds.extend(
            targets
                .into_iter()
                .filter(|target| is_hidden(target))
                .map(|target| Bind { target, source: source.clone() }),
        );
    }
    binds.sort();
    binds.dedup();
    let mut kept: Vec<Bind> = Vec::new();
    for bind in binds {
        if !kept.iter().any(|outer| outer.covers(&bind)) {
            kept.push(bind);
        }
    }
    kept
}

impl Bind {
    /// True if this bind mount already makes the source of `inner` visible at the target of `inner`.
    fn covers(&self, inner: &Self) -> bool {
        inner.target.strip_prefix(&self.target).is_ok_and(|rest| self.source.join(rest) == inner.source)
    }
}

/// True if the machine's own file systems hide the host's `path`. The whole `/tmp` is never bound, because programs may expect an
/// empty `/tmp`.
fn is_hidden(path: &Path) -> bool {
    OWN.iter().any(|own| path.strip_prefix(own).is_ok_and(|rest| rest != Path::new("")))
}

/// Removes `..` components together with the components before them, without reading the file system.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                plain.pop();
            }
            other => plain.push(other),
        }
    }
    plain
}

/// Returns the list that `rig-init` reads: source and target, one per line.
///
/// # Errors
/// Fails if a name contains a line break.
pub(super) fn list(binds: &[Bind]) -> Result<Vec<u8>> {
    let mut list = OsString::new();
    for path in binds.iter().flat_map(|bind| [&bind.source, &bind.target]) {
        ensure!(
            !path.as_os_str().as_bytes().contains(&b'\n'),
            "{}: the rig does not support line breaks in names",
            path.display()
        );
        list.push(path);
        list.push("\n");
    }
    Ok(list.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    /// Runs the scripts' `check_places` in a checkout with this name. Returns true on success, and stderr.
    fn checked(checkout: &str, variables: &[(&str, &str)]) -> (bool, String) {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join(checkout).join("scripts/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::copy(carom_tools::checkout().join("scripts/lib/common.sh"), lib.join("common.sh")).unwrap();
        let mut command = Command::new("bash");
        command.args(["-euc", "source \"$1\"; check_places", "test"]).arg(lib.join("common.sh"));
        command.env_remove("CARGO_TARGET_DIR").env("CAROM_CACHE", dir.path().join("cache"));
        command.envs(variables.iter().map(|(name, value)| (name, dir.path().join(value))));
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn scripts_accept_blanks_in_paths_and_name_unusable_places() {
        assert_eq!(checked("a clone, it's", &[("CARGO_TARGET_DIR", "a target")]), (true, String::new()));
        for (checkout, variable, value, reason) in [
            ("a:b", "OTHER", "", "a colon"),
            ("a\nb", "OTHER", "", "a line break"),
            ("a", "CARGO_TARGET_DIR", "b:c", "a colon"),
            ("a", "CAROM_CACHE", "b c", "CAROM_CACHE"),
        ] {
            let (fine, said) = checked(checkout, &[(variable, value)]);
            assert!(!fine && said.contains(reason), "{checkout:?} {value:?}: {said}");
        }
    }

    /// Creates a directory below `/tmp`.
    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = fs::canonicalize(dir.path()).unwrap();
        (dir, path)
    }

    #[test]
    fn directories_below_tmp_are_bound_and_those_elsewhere_are_not() {
        let (_dir, path) = place();
        let elsewhere = [PathBuf::from("/usr/bin"), "/tmp".into(), "/".into(), path.join("missing")];

        let binds = binds(&[elsewhere.as_slice(), std::slice::from_ref(&path)].concat());

        assert_eq!(binds, [Bind { target: path.clone(), source: path }]);
    }

    #[test]
    fn nested_directory_is_not_bound_again() {
        let (_dir, path) = place();
        let inner = path.join("a clone/target");
        fs::create_dir_all(&inner).unwrap();

        let binds = binds(&[inner, path.join("a clone/../a clone"), path.join("a clone")]);

        assert_eq!(binds.len(), 1);
        assert_eq!(binds[0].target, path.join("a clone"));
    }

    #[test]
    fn symbolic_link_is_bound_at_its_path_and_at_its_target() {
        let (_dir, path) = place();
        let (real, link, outside) = (path.join("real"), path.join("link"), path.join("outside"));
        fs::create_dir_all(real.join("clone")).unwrap();
        symlink(&real, &link).unwrap();
        symlink("/usr/bin", &outside).unwrap();

        let binds = binds(&[link.join("clone"), outside.clone()]);

        let expected = [
            Bind { target: link.join("clone"), source: real.join("clone") },
            Bind { target: outside, source: fs::canonicalize("/usr/bin").unwrap() },
            Bind { target: real.join("clone"), source: real.join("clone") },
        ];
        assert_eq!(binds, expected);
    }

    #[test]
    fn list_has_two_lines_for_each_and_refuses_line_breaks() {
        let bind = |name: &str| Bind { target: name.into(), source: name.into() };
        assert_eq!(list(&[bind("/tmp/a b")]).unwrap(), b"/tmp/a b\n/tmp/a b\n");
        assert!(list(&[bind("/tmp/a\nb")]).is_err());
    }
}
