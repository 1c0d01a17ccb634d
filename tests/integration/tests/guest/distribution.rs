// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian guest that was made from packages: its boot, its login, and typical use. Each test takes minutes in an emulated
//! machine.

use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use carom_integration::Site;
use carom_integration::harness::{guest_test, tell};
use serde_json::Value;

use crate::support::SITE;
use crate::support::debian::{Debian, Network};
use crate::support::repository::Repository;

/// Maximum time for the installation of packages. The installation of a kernel makes an initrd, which takes minutes in an
/// emulated machine.
const INSTALL_TIME: Duration = Duration::from_secs(420);

/// Checks that no service failed, and that the clock and the size of the file system are correct. Checks that the guest has an
/// address by DHCP, and resolves a name by DNS.
pub(crate) fn works(debian: &mut Debian, net: &str) {
    assert_eq!(debian.run("systemctl --failed --plain --no-legend"), "");
    let seconds: u64 = debian.run("date +%s").trim().parse().unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    assert!(now.abs_diff(seconds) <= 5, "the guest's clock says {seconds}, the host's {now}");
    let mib: u64 = debian.run("df --output=size -BM / | tail -n 1").trim().trim_end_matches('M').parse().unwrap();
    assert!(mib > 900, "the file system has only {mib} MiB on a disk of 1024 MiB");
    let addresses =
        debian.run("for i in $(seq 60); do ip -4 -br address show scope global | grep . && break; sleep 1; done");
    assert!(addresses.contains(&format!(" {net}.")), "{addresses}");
    let name = debian.run("getent ahostsv4 host.internal");
    assert!(name.starts_with(&format!("{net}.1 ")), "{name}");
    debian.run("ping -c 2 -q host.internal");
    tell("services, time, disk and network are correct");
}

/// Checks that the guest rejects the repository without the repository's key. Then installs the key and `packages` from the
/// repository in the guest.
pub(crate) fn installs(debian: &mut Debian, repository: &Repository, packages: &[&str]) {
    let server = format!("http://host.internal:{}", repository.port);
    debian.run("rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*; mkdir -p /etc/apt/keyrings");
    debian.run(&format!("echo 'deb {server}/ ./' >/etc/apt/sources.list.d/test.list"));
    let (_, said) = debian.try_run("apt-get update -o Acquire::Languages=none");
    assert!(said.contains("NO_PUBKEY"), "a repository with an unknown key was trusted: {said}");
    debian.run(&format!("/usr/lib/apt/apt-helper download-file {server}/key.gpg /etc/apt/keyrings/test.gpg"));
    debian.run(&format!(
        "echo 'deb [signed-by=/etc/apt/keyrings/test.gpg] {server}/ ./' >/etc/apt/sources.list.d/test.list"
    ));
    debian.run("apt-get update -q -o APT::Update::Error-Mode=any -o Acquire::Languages=none");
    tell("the guest has read the repository");
    let install = "DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends";
    let (status, said) = debian.try_run_within(&format!("{install} {}", packages.join(" ")), INSTALL_TIME);
    assert_eq!(status, 0, "{packages:?}: {said}");
    for package in packages {
        let file = format!("/{package}_");
        assert!(repository.asked().iter().any(|path| path.contains(&file)), "{:?}", repository.asked());
    }
    tell("the guest has installed packages");
}

#[guest_test(needs(Distribution), slow = "four minutes; other tests boot Debian's kernel, and use disks and networks")]
fn stock_debian_boots_to_a_login_and_works() {
    let net = "10.77.60";
    let _network = Network::start("carom-d0", net);
    let repository = Repository::serve(&[]);
    let mut debian = Debian::start("carom-d0", "", &[]);
    debian.log_in();
    works(&mut debian, net);
    installs(&mut debian, &repository, &["carom-greeting"]);
    assert_eq!(debian.run("cat /usr/share/carom-greeting/text"), "hello from the repository\n");

    debian.leave("systemctl reboot");
    debian.log_in();
    assert_eq!(debian.run("cat /usr/share/carom-greeting/text"), "hello from the repository\n");
    assert_eq!(debian.run("systemctl --failed --plain --no-legend"), "");

    // systemd-logind handles the power button and powers off the guest.
    let remote = SITE.remote.as_ref().expect("CAROM_REMOTE is set");
    let pressed = Command::new(remote).arg("--api-socket").arg(debian.api()).arg("power-button").status().unwrap();
    assert!(pressed.success());
    assert!(debian.wait().success());
}

#[guest_test(
    needs(Distribution),
    slow = "three minutes; stock_debian_boots_to_a_login_and_works covers the guest without IOMMU"
)]
fn stock_debian_works_with_its_devices_behind_the_iommu() {
    let net = "10.77.61";
    let _network = Network::start("carom-d1", net);
    let mut debian = Debian::start("carom-d1", ",iommu=on", &["--rng", "src=/dev/urandom,iommu=on"]);
    debian.log_in();
    works(&mut debian, net);
    // A disk, a network card and an entropy device, each in its own IOMMU group.
    let groups =
        debian.run("ls -d /sys/kernel/iommu_groups/*/devices/* | wc -l; cat /sys/kernel/iommu_groups/*/type | sort -u");
    assert_eq!(groups, "3\nDMA\n");
    debian.power_off();
}

#[guest_test(
    needs(Distribution),
    slow = "three minutes; small guests cover bouncing of disks, network cards and drives"
)]
fn debian_with_a_patched_kernel_bounces_its_devices_dma() {
    let net = "10.77.64";
    let _network = Network::start("carom-d4", net);
    let drive = format!("path={},iommu=on", Site::sysfs(&SITE.nvme[0]).display());
    let options = ["--rng", "src=/dev/urandom,iommu=on", "--device", &drive, "--iommu-bounce", "size=64M"];
    let mut debian = Debian::start_patched("carom-d4", &options);
    debian.log_in();
    works(&mut debian, net);

    // Create a file system on the passed-through drive. Written data must still exist after remounting.
    debian.run("mkfs.ext4 -q -F /dev/nvme0n1 && mount /dev/nvme0n1 /mnt && head -c 48M /dev/urandom >/root/bytes");
    let before = debian.iommu_counters();
    debian.run("cp /root/bytes /mnt && umount /mnt && mount /dev/nvme0n1 /mnt && cmp /root/bytes /mnt/bytes");
    debian
        .run("for i in $(seq 200); do echo $i >/mnt/$i; sync /mnt/$i; done; umount /mnt && fsck.ext4 -fn /dev/nvme0n1");
    let after = debian.iommu_counters();
    let count = |counters: &Value, name: &str| counters[name].as_u64().unwrap_or_else(|| panic!("{name}: {counters}"));
    let maps_of = |counters: &Value| count(counters, "requests_map") + count(counters, "requests_map_list");
    let maps = maps_of(&after) - maps_of(&before);
    tell(&format!("{maps} MAPs, {} bytes pinned at most", count(&after, "peak_pinned_bytes")));
    assert!(count(&after, "window_bytes") > 0, "{after}");
    // Large files are written and read in requests that are too large to bounce, so the guest maps these requests. The requests
    // for the 200 small files bounce, so they need no mappings.
    assert!(maps < 1500, "{after}");
    assert!(count(&after, "peak_pinned_bytes") < 128 << 20, "RAM was pinned: {after}");
    assert_eq!(count(&after, "faults"), 0, "{after}");
    debian.power_off();
}

#[guest_test(needs(Distribution, Package), slow = "three minutes; nothing else installs the package")]
fn stock_debian_installs_all_of_carom_from_a_repository() {
    let net = "10.77.63";
    let _network = Network::start("carom-d3", net);
    let repository = Repository::serve(&[SITE.package.as_ref().unwrap()]);
    let mut debian = Debian::start("carom-d3", "", &[]);
    debian.log_in();
    works(&mut debian, net);
    installs(&mut debian, &repository, &["carom"]);

    for program in ["carom", "carom-remote"] {
        let said = debian.run(&format!("{program} --version"));
        assert!(said.starts_with(program), "{said}");
        let completions = format!(
            ". /usr/share/bash-completion/bash_completion; _completion_loader {program}; complete -p {program}"
        );
        debian.run(&format!("bash -c '{completions}'"));
    }
    assert!(debian.run("vfio-bind --help").contains("vfio-pci"));
    let pages = debian.run("man -w carom carom-remote carom-remote-resize vfio-bind");
    assert_eq!(pages.lines().count(), 4, "{pages}");
    debian.run("systemd-analyze verify --man=no carom@any.service");
    assert_eq!(debian.run("id -nG carom"), "carom kvm\n");
    unit_runs(&mut debian);
    debian.run("DEBIAN_FRONTEND=noninteractive apt-get purge -q -y carom");
    assert_ne!(
        debian.try_run("test -e /usr/bin/carom || test -e /lib/systemd/system/carom@.service").0,
        0,
        "files of the package still exist after the purge"
    );
    debian.power_off();
}

/// Starts carom in the guest as a service. If the guest has KVM, checks that the service's API answers, and that a signal ends
/// the service. Otherwise, checks that carom reports the missing /dev/kvm.
fn unit_runs(debian: &mut Debian) {
    debian.run("echo \"CAROM_OPTIONS=\\\"--kernel /boot/vmlinuz-$(uname -r) --cmdline 'panic=0 quiet'\\\"\" >/etc/carom/any.conf");
    debian.run("systemctl start carom@any");
    let wait = |condition: &str| format!("for i in $(seq 90); do {condition} && break; sleep 1; done; {condition}");
    if debian.try_run("test -c /dev/kvm").0 == 0 {
        let ping = "carom-remote --api-socket /run/carom/any/api ping >/dev/null";
        let log = "journalctl -u carom@any --no-pager -o cat; ls -l /run/carom/any";
        // The API answers before carom has created the VM and its console, so wait for both.
        for condition in [ping, "test -S /run/carom/any/console"] {
            debian.run(&format!("{{ {}; }} || {{ {log}; false; }}", wait(condition)));
        }
        debian.run("systemctl kill carom@any");
        debian.run(&wait("systemctl show -p ActiveState carom@any | grep -qx ActiveState=inactive"));
        tell("the unit has run a machine");
    } else {
        debian.run(&wait("systemctl is-failed -q carom@any"));
        let log = debian.run("journalctl -u carom@any --no-pager -o cat");
        assert!(log.contains("/dev/kvm"), "{log}");
        tell("the unit has reported that there is no KVM");
    }
}
