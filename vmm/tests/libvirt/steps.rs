// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Calls of virsh, in the order of the test, with the expected results.

/// Request of libvirt.
pub(crate) struct Request {
    /// Name of the operation.
    pub(crate) name: &'static str,
    /// Expected status of the answer.
    pub(crate) status: u16,
    /// Expected parts of the answer.
    pub(crate) says: &'static [&'static str],
    /// True if this is the first request to a VMM.
    pub(crate) begins: bool,
    /// True if the request carries a descriptor of a tap interface.
    pub(crate) needs_the_hosts_network: bool,
}

/// Call of virsh.
pub(crate) struct Step {
    /// Verb and arguments.
    pub(crate) virsh: &'static str,
    /// True if the call succeeds.
    pub(crate) done: bool,
    /// Expected parts of its output.
    pub(crate) says: &'static [&'static str],
    /// Requests that libvirt makes to the VMM for the call.
    pub(crate) requests: &'static [Request],
}

const fn request(name: &'static str) -> Request {
    Request { name, status: 204, says: &[], begins: false, needs_the_hosts_network: false }
}

const fn first(name: &'static str) -> Request {
    Request { begins: true, ..request(name) }
}

const fn info(says: &'static [&'static str]) -> Request {
    Request { status: 200, says, ..request("vm.info") }
}

const ADD_NET: Request = Request { needs_the_hosts_network: true, ..request("vm.add-net") };

const fn step(virsh: &'static str, says: &'static [&'static str], requests: &'static [Request]) -> Step {
    Step { virsh, done: true, says, requests }
}

const RUNNING: &[&str] = &["\"state\":\"Running\"", "\"serial\":{\"file\":\"/dev/pts/"];

/// Calls in the lives of two domains.
pub(crate) static STEPS: &[Step] = &[
    step("version", &["Running hypervisor: CH 53.0.0"], &[]),
    step("define /tmp/carom-libvirt-XXXXXX/vm.xml", &[], &[]),
    step("start vm", &[], &[first("vm.create"), request("vm.boot"), info(RUNNING)]),
    step("list --all", &["vm   running"], &[]),
    step("dominfo vm", &["CPU(s):         1"], &[]),
    step("vcpuinfo vm", &["VCPU:           0", "State:          running"], &[]),
    step("dumpxml vm", &["<source path='/dev/pts/"], &[]),
    step("vcpupin vm 0 0", &[], &[]),
    step("vcpupin vm", &["0   0"], &[]),
    step("emulatorpin vm", &["0"], &[]),
    step("suspend vm", &[], &[request("vm.pause")]),
    step("domstate vm", &["paused"], &[]),
    step("resume vm", &[], &[request("vm.resume")]),
    step("domstate vm", &["running"], &[]),
    // libvirt requests the VM's information when an event reports the reboot.
    step("reboot vm", &[], &[request("vm.reboot"), info(RUNNING)]),
    step("save vm /tmp/carom-libvirt-XXXXXX/saved", &[], &[request("vm.pause"), request("vm.snapshot")]),
    step("list --all", &["vm   shut off"], &[]),
    // The restore fails before libvirt makes a request, because libvirt has forgotten which file contains the VMM's process ID.
    Step {
        virsh: "restore /tmp/carom-libvirt-XXXXXX/saved",
        done: false,
        says: &["failed to create connection to CH socket"],
        requests: &[],
    },
    step("undefine vm", &[], &[]),
    step("define /tmp/carom-libvirt-XXXXXX/net.xml", &[], &[]),
    step("start net", &[], &[first("vm.create"), ADD_NET, request("vm.boot"), info(RUNNING)]),
    step("shutdown net", &[], &[request("vm.shutdown")]),
    step("list --all", &["net   shut off"], &[]),
    step("start net", &[], &[first("vm.create"), ADD_NET, request("vm.boot"), info(RUNNING)]),
    // For `destroy`, libvirt makes no request to the VMM, and the VMM keeps running.
    step("destroy net", &[], &[]),
    step("list --all", &["net   shut off"], &[]),
    step("undefine net", &[], &[]),
];

/// Request that libvirt would make to restore the saved VM, derived from libvirt's sources.
pub(crate) static RESTORE: Request = first("vm.restore");

/// Requests of a newer libvirt's driver for `attach-device` and `detach-device` of a disk, derived from libvirt's sources.
pub(crate) static HOT_PLUG: [(Request, &str); 2] = [
    (Request { status: 200, says: &["\"id\":\"virtio-disk1\"", "\"bdf\":"], ..request("vm.add-disk") }, "add-disk"),
    (request("vm.remove-device"), "remove-device"),
];

/// Returns the definitions of the domains whose files are in `directory`.
pub(crate) fn domains(directory: &str) -> [(&'static str, String); 2] {
    let disk = "<disk type='file' device='disk'><driver name='raw'/><source file='DIRECTORY/disk.img'/><target dev='vda' bus='virtio'/></disk>";
    let net = "<interface type='ethernet'><mac address='52:54:00:12:34:56'/><target dev='carom0'/><model type='virtio'/></interface>";
    let domain = |name: &str, more: &str| {
        format!(
            "<domain type='kvm'><name>{name}</name><memory unit='MiB'>64</memory><vcpu current='1'>2</vcpu>\
             <os><type arch='x86_64'>hvm</type><kernel>DIRECTORY/kernel</kernel><cmdline>console=ttyS0</cmdline></os>\
             <devices><emulator>DIRECTORY/cloud-hypervisor</emulator>{more}<serial type='pty'/></devices></domain>"
        )
        .replace("DIRECTORY", directory)
    };
    [("vm.xml", domain("vm", disk)), ("net.xml", domain("net", net))]
}
