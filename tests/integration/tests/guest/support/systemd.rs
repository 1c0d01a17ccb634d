// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! systemd of a test, in addition to the host's systemd. It is the first process in its own namespaces for processes, mounts
//! and control groups. This systemd starts only the test's units. It uses the host's programs, devices and network. Changes to
//! the host's file system are discarded at the end.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::harness::SYSTEMD;
use carom_integration::host_memory::MemoryGroup;
use tempfile::TempDir;

/// Interval between checks of systemd's state.
const POLL: Duration = Duration::from_millis(50);

/// Maximum time of each wait for systemd.
const TIME: Duration = Duration::from_secs(60);

/// Directory with all units of this systemd. Most of the host's units are missing here, because they would change the host's
/// kernel: its modules, binary formats and parameters.
const UNITS: &str = "etc/systemd/system";

/// Targets that services depend on. Here, these targets start no other units, except for the journal.
const TARGETS: [&str; 4] = ["sysinit.target", "basic.target", "network.target", "shutdown.target"];

/// Units of the journal, which records the output of services. Their files are copied from the host.
const JOURNAL: [&str; 3] = ["systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket"];

/// Shell script that moves itself to the control group `$1` and runs a program there. No other process may be in the group,
/// because otherwise the kernel does not permit limits on its subgroups.
const ENTER: &str = r#"echo 0 >"$1/cgroup.procs" && shift && exec "$@""#;

/// Shell script that prepares the root file system and becomes systemd. The file `pid` then contains the process ID that the
/// script, and later systemd, has on the host. The script can read this ID, because its `/proc` is still the host's.
const BEGIN: &str = r#"
set -eu
read -r pid rest </proc/self/stat
dir=$1
systemd=$2
mount -t tmpfs tmpfs "$dir/room"
mkdir "$dir/room/upper" "$dir/room/work" "$dir/room/root"
root=$dir/room/root
mount -t overlay -o "lowerdir=/,upperdir=$dir/room/upper,workdir=$dir/room/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
rm -rf "$root/etc/systemd/system" "$root/var/log/journal"
cp -R "$dir/files/." "$root/"
echo "$pid" >"$dir/pid"
cd "$root"
pivot_root . mnt
umount -l /mnt
systemd-sysusers /usr/lib/sysusers.d/carom.conf
exec env -i container=carom-test PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH=/etc/systemd/system \
    "$systemd" --system --unit=basic.target --log-target=journal --show-status=no
"#;

/// Running systemd. Dropping this value ends systemd and all processes that it has started.
pub(crate) struct Systemd {
    process: Child,
    pid: u32,
    // These two fields are dropped after all processes have ended. The directory is dropped before the group.
    _dir: TempDir,
    group: MemoryGroup,
}

impl Systemd {
    /// Starts systemd with additional files in its root file system. Each tuple contains the path without the leading slash,
    /// and the host file to copy. One of the files must be `usr/lib/sysusers.d/carom.conf`, which names the users to create.
    pub(crate) fn start(files: &[(&str, &Path)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["room", "files"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let place = |path: &str| {
            let file = dir.path().join("files").join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            file
        };
        for (path, source) in files {
            fs::copy(source, place(path)).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
        }
        for target in TARGETS {
            // Without this line, nothing would start the journal before the first service.
            let wants = if target == "basic.target" { "Wants=systemd-journald.socket\n" } else { "" };
            fs::write(place(&format!("{UNITS}/{target}")), format!("[Unit]\nDefaultDependencies=no\n{wants}")).unwrap();
        }
        for unit in JOURNAL {
            let source = Path::new("/lib/systemd/system").join(unit);
            fs::copy(&source, place(&format!("{UNITS}/{unit}"))).unwrap();
        }
        // systemd needs its own control group, with limits on subgroups. Only the host's root group may have both processes and
        // limited subgroups.
        let group = MemoryGroup::new("carom-systemd").unwrap();
        fs::write(group.dir().parent().unwrap().join("cgroup.subtree_control"), "+pids").unwrap();
        let mut process = Command::new("unshare")
            .args(["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"])
            .arg(group.dir())
            .args(["unshare", "--cgroup", "sh", "-c", BEGIN, "sh"])
            .args([dir.path(), Path::new(SYSTEMD)])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let pid = wait_for("systemd has begun", || {
            assert!(process.try_wait().unwrap().is_none(), "systemd did not start");
            fs::read_to_string(dir.path().join("pid")).ok()?.trim().parse().ok()
        });
        let systemd = Self { process, pid, _dir: dir, group };
        let mut said = String::new();
        wait_for("systemd runs", || {
            let state = systemd.try_run("systemctl is-system-running").1;
            if state != said {
                eprintln!("systemd: {state}");
                said.clone_from(&state);
            }
            (state == "running\n").then_some(())
        });
        systemd
    }

    /// Returns the host's path for a path in systemd's root file system.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.pid)).join(path.trim_start_matches('/'))
    }

    /// Returns the control group of a unit.
    pub(crate) fn group_of(&self, slice: &str, unit: &str) -> PathBuf {
        self.group.dir().join("system.slice").join(slice).join(unit)
    }

    /// Runs a shell command in systemd's namespaces. Returns true on success, and the output.
    pub(crate) fn try_run(&self, command: &str) -> (bool, String) {
        let output = Command::new("nsenter")
            .args(["--target", &self.pid.to_string(), "--mount", "--pid", "--cgroup", "--uts", "--ipc"])
            // Use systemd's root directory. In the rig, the root of the mount namespace is a different directory: that of the
            // machine's first program.
            .args(["--root", "--wd"])
            .args(["sh", "-c", &format!("{{ {command}\n}} 2>&1")])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn run(&self, command: &str) -> String {
        let (success, said) = self.try_run(command);
        assert!(success, "{command}: {said}");
        said
    }

    /// Starts a unit, which must fail. Returns the unit's output, with systemd's messages about the unit.
    pub(crate) fn refused(&self, unit: &str) -> String {
        let (_, said) = self.try_run(&format!("systemctl start {unit}"));
        wait_for(&format!("{unit} has failed: {said}"), || {
            self.try_run(&format!("systemctl is-failed -q {unit}")).0.then_some(())
        });
        self.log(unit)
    }

    /// Returns the unit's output from the journal, with systemd's messages about the unit.
    pub(crate) fn log(&self, unit: &str) -> String {
        self.run(&format!("journalctl --sync; journalctl -u {unit} -o cat --no-pager"))
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Killing the first process of a namespace also ends all its other processes.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let start = Instant::now();
        while let Err(error) = remove_groups_below(self.group.dir()) {
            if start.elapsed() > TIME {
                eprintln!("cannot remove systemd's control groups: {error}");
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// Removes the control groups in a directory, inner ones first.
fn remove_groups_below(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_groups_below(&entry.path())?;
            match fs::remove_dir(entry.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Calls `look` repeatedly until it returns a value. Fails after [`TIME`].
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < TIME, "timeout after {TIME:?}: {what}");
        thread::sleep(POLL);
    }
}
