// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Containers with Kata Containers' own runtime and agent. containerd starts the containers, and their sandboxes run on Carom
//! (`docs/kata.md`).

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::harness::guest_test;
use carom_tools::archive::Archive;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{MIB, SITE};

/// Maximum run time of a container host.
const TIME: Duration = Duration::from_secs(300);

/// Script that creates the container host, and runs the steps that it reads from standard input.
const HOST: &str = include_str!("kata_runtime/host.sh");

/// Minimal configuration of containerd.
const CONTAINERD: &str = r#"
version = 2
root = "DIR/containerd/root"
state = "DIR/containerd/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "DIR/containerd.sock"
"#;

/// Configuration of Kata Containers. The settings are Kata's defaults, except for the paths, and except for the sizes and
/// times, which are adapted to an emulated machine. Unlike Kata's guest kernel, the guest kernel of this test onlines added RAM
/// only with a kernel parameter.
const KATA: &str = r#"
[hypervisor.clh]
path = "DIR/vmm"
kernel = "RUNTIME/vmlinux"
initrd = "DIR/initrd"
disable_guest_selinux = true
disable_selinux = true
kernel_params = "cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1 iommu.strict=1 memhp_default_state=online"
default_vcpus = 1
default_maxvcpus = 2
default_memory = 512
default_maxmemory = 1024
shared_fs = "virtio-fs"
virtio_fs_daemon = "RUNTIME/virtiofsd"
virtio_fs_extra_args = ["--thread-pool-size=1", "--announce-submounts"]
block_device_driver = "virtio-blk"
DRIVES
[agent.kata]
dial_timeout = 120
[runtime]
NETWORK
disable_guest_seccomp = true
vfio_mode = "guest-kernel"
create_container_timeout = 200
"#;

/// Network settings of the runtime for a container without a network, and for a container in a network namespace of the host.
const NO_NETWORK: &str = "disable_new_netns = true\ninternetworking_model = \"none\"";
const NETWORK: &str = "internetworking_model = \"tcfilter\"";

/// VMM that the shim starts. The shim itself can request neither windows nor devices behind the virtual IOMMU, so this script
/// requests both.
const VMM: &str = r#"#!/bin/sh
CAROM_IOMMU_BOUNCE=size=64M CAROM_ALL_BEHIND_IOMMU=on exec DIR/cloud-hypervisor "$@" 2>>DIR/said
"#;

/// Files of a container host. The host runs in its own namespaces for processes, mounts and more.
struct Host {
    dir: TempDir,
    runtime: PathBuf,
}

impl Host {
    /// Creates the files. `drives` and `network` are lines of the runtime's configuration. The runtime's programs are in the
    /// directory that `CAROM_KATA_RUNTIME` names.
    fn new(drives: &str, network: &str) -> Self {
        let runtime = env::var_os("CAROM_KATA_RUNTIME").expect("CAROM_KATA_RUNTIME is set").into();
        let host = Self { dir: tempfile::tempdir().unwrap(), runtime };
        fs::create_dir(host.dir.path().join("containerd")).unwrap();
        host.write("containerd.toml", CONTAINERD);
        host.write("kata.toml", &KATA.replace("DRIVES", drives).replace("NETWORK", network));
        host.write("vmm", VMM);
        host.write("host.sh", HOST);
        symlink(&SITE.carom, host.dir.path().join("cloud-hypervisor")).unwrap();
        let program = |name: &str| fs::read(host.runtime.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut initrd = Archive::default();
        initrd.executable("init", program("kata-agent"));
        fs::write(host.dir.path().join("initrd"), initrd.bytes().unwrap()).unwrap();
        host
    }

    fn write(&self, name: &str, text: &str) {
        let file = self.dir.path().join(name);
        let text = text.replace("DIR", self.dir.path().to_str().unwrap());
        fs::write(&file, text.replace("RUNTIME", self.runtime.to_str().unwrap())).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    }

    /// Starts the host, runs `steps` in it and returns their output.
    fn run(&self, steps: &str) -> String {
        fs::write(self.dir.path().join("steps"), steps).unwrap();
        let output = self.dir.path().join("output");
        let child = Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts", "--ipc", "--cgroup"])
            .args(["--propagation", "private", "bash"])
            .arg(self.dir.path().join("host.sh"))
            .arg(self.dir.path())
            .arg(&self.runtime)
            .env("CAROM_REMOTE", SITE.remote.as_ref().unwrap())
            .stdin(File::open(self.dir.path().join("steps")).unwrap())
            .stdout(File::create(&output).unwrap())
            .stderr(File::create(self.dir.path().join("errors")).unwrap())
            .spawn()
            .unwrap();
        let ended = ends_well(child);
        let said = read(&output);
        if !ended {
            for name in ["errors", "said", "containerd.log", "syslog"] {
                eprintln!("{name}:\n{}", read(&self.dir.path().join(name)));
            }
            panic!("the steps failed after:\n{said}");
        }
        said
    }
}

/// Waits until a process ends, and kills it after [`TIME`]. Returns true if its status is 0.
fn ends_well(mut child: Child) -> bool {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if start.elapsed() > TIME {
            child.kill().unwrap();
            child.wait().unwrap();
            return false;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

fn read(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).replace('\r', "")
}

/// Returns the values of the lines `CAROM-KATA key value`.
fn values<'said>(said: &'said str, key: &str) -> Vec<&'said str> {
    let of_key = |line: &'said str| line.strip_prefix("CAROM-KATA ")?.strip_prefix(key)?.strip_prefix(' ');
    said.lines().filter_map(of_key).collect()
}

fn value<'said>(said: &'said str, key: &str) -> &'said str {
    let values = values(said, key);
    assert_eq!(values.len(), 1, "{key} in\n{said}");
    values[0]
}

/// Steps for a container: start the container, run a second process in it, and wait for the container's end.
const LIFE: &str = r#"
run box -- sh -c '
    echo "CAROM-KATA kernel $(cat /proc/sys/kernel/random/boot_id)"
    echo of-the-container >/said
    while [ ! -e /end ]; do sleep 0.2; done
    exit 7' &
container=$!
file=$(file_of_container $container said)
say file "$(cat "$file")"
say kernel "$(cat /proc/sys/kernel/random/boot_id)"
say vmms "$(count_vmms)"
ctr task exec --exec-id second box sh -c 'echo "CAROM-KATA second $(cat /said)"; touch /end'
status=0
wait "$container" || status=$?
say status "$status"
say vmms "$(count_vmms)"
"#;

#[guest_test(needs(KataRuntime))]
fn container_of_kata_containers_lives_on_carom() {
    let host = Host::new("", NO_NETWORK);
    let said = host.run(LIFE);
    let kernels = values(&said, "kernel");
    assert_eq!(kernels.len(), 2, "{said}");
    assert_ne!(kernels[0], kernels[1], "the container runs on the host's kernel");
    assert_eq!(value(&said, "file"), "of-the-container");
    assert_eq!(value(&said, "second"), "of-the-container");
    assert_eq!(value(&said, "status"), "7");
    assert_eq!(values(&said, "vmms"), ["1", "0"]);
}

/// Steps for a container in a network namespace of the host. The container reads a page from a web server of the host.
const PAGE: &str = r#"
ip netns add pod
ip link add host0 type veth peer name eth0 netns pod
ip addr add 10.88.0.1/24 dev host0
ip link set host0 up
ip -n pod addr add 10.88.0.2/24 dev eth0
ip -n pod link set eth0 up
ip -n pod link set lo up
mkdir "$dir/pages"
echo of-the-host >"$dir/pages/page"
busybox httpd -p 10.88.0.1:80 -h "$dir/pages"
run box --with-ns network:/run/netns/pod -- sh -c 'echo "CAROM-KATA page $(wget -qO- http://10.88.0.1/page)"'
"#;

#[guest_test(needs(KataRuntime))]
fn kata_container_has_the_network_of_its_namespace() {
    let host = Host::new("", NETWORK);
    let said = host.run(PAGE);
    assert_eq!(value(&said, "page"), "of-the-host");
}

/// Steps for a container with a drive. The container writes 16 MiB in blocks of 4 KiB, and reads them in blocks of 16 KiB.
const DRIVE: &str = r#"
run box --device "/dev/vfio/GROUP" -- sh -c '
    IFS=: read -r major minor </sys/block/nvme0n1/dev
    mknod /dev/drive b "$major" "$minor"
    head -c 16777216 /dev/urandom >/tmp/wrote
    dd if=/tmp/wrote of=/dev/drive bs=4k oflag=direct conv=fsync
    dd if=/dev/drive of=/tmp/read bs=16k count=1024 iflag=direct
    cmp /tmp/wrote /tmp/read && echo "CAROM-KATA same $(stat -c %s /tmp/read)"
    touch /done
    while [ ! -e /end ]; do sleep 0.2; done' &
container=$!
file_of_container $container done >&2
say counters "$(remote box counters | tr -d '\n')"
say info "$(remote box info | tr -d '\n')"
ctr task exec --exec-id end box touch /end
wait "$container"
"#;

/// Runs `steps` with `GROUP` replaced by the number of the drive's IOMMU group, and returns their output. The line `setting` of
/// the runtime's configuration selects how the drive is added to a container.
fn with_the_drive(setting: &str, steps: &str) -> String {
    let host = Host::new(setting, NO_NETWORK);
    let link = fs::read_link(Site::sysfs(&SITE.nvme[0]).join("iommu_group")).unwrap();
    host.run(&steps.replace("GROUP", link.file_name().unwrap().to_str().unwrap()))
}

fn drive_bounces(setting: &str) {
    let said = with_the_drive(setting, DRIVE);
    assert_eq!(value(&said, "same"), "16777216");
    let info: Value = serde_json::from_str(value(&said, "info")).unwrap();
    assert_eq!(info["config"]["devices"][0]["iommu"], true, "{info}");
    let counters: Value = serde_json::from_str(value(&said, "counters")).unwrap();
    println!("CAROM-KATA {}", counters["_iommu"]);
    let count = |name: &str| counters["_iommu"][name].as_u64().unwrap();
    assert!(count("requests_window_add") - count("failed_window_add") > 0, "{counters}");
    // Without windows, the guest would map each of about 5000 reads and writes.
    assert!(count("requests_map") + count("requests_map_list") < 500, "{counters}");
    assert!(count("peak_pinned_bytes") < 32 * MIB, "{counters}");
}

/// Steps for a container with a drive. The container requests one CPU and 256 MiB in addition to the sandbox's own CPU and
/// memory, and waits for the memory.
const MORE: &str = r#"
run box --cpus 1 --memory-limit 268435456 --device "/dev/vfio/GROUP" -- sh -c '
    echo "CAROM-KATA cpus $(cat /sys/devices/system/cpu/online)"
    until [ "$(sed -n "s/^MemTotal: *\([0-9]*\) kB/\1/p" /proc/meminfo)" -gt 655360 ]; do sleep 0.2; done
    echo asked >/asked
    while [ ! -e /end ]; do sleep 0.2; done' &
container=$!
file_of_container $container asked >&2
say info "$(remote box info | tr -d '\n')"
say counters "$(remote box counters | tr -d '\n')"
ctr task exec --exec-id end box touch /end
wait "$container"
"#;

#[guest_test(needs(KataRuntime))]
fn container_with_a_drive_gets_the_cpu_and_memory_it_asks_for() {
    let said = with_the_drive("cold_plug_vfio = \"root-port\"", MORE);
    assert_eq!(value(&said, "cpus"), "0-1");
    let info: Value = serde_json::from_str(value(&said, "info")).unwrap();
    assert_eq!(info["config"]["cpus"]["boot_vcpus"], 2, "{info}");
    assert_eq!(info["memory_actual_size"], 768 * MIB, "{info}");
    let counters: Value = serde_json::from_str(value(&said, "counters")).unwrap();
    assert!(counters["_iommu"]["peak_pinned_bytes"].as_u64().unwrap() < 32 * MIB, "{counters}");
}

#[guest_test(needs(KataRuntime))]
fn drive_of_a_new_container_bounces() {
    drive_bounces("cold_plug_vfio = \"root-port\"");
}

#[guest_test(needs(KataRuntime))]
fn drive_added_to_a_container_bounces() {
    drive_bounces("hot_plug_vfio = \"root-port\"");
}
