// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of `vm.resize` and `vm.resize-disk`.

use std::io::{Read, Seek};

use carom_api::DiskConfig;
use carom_api::kinds::KindConfig;
use carom_api::types::VmResizeDisk;

use super::*;

#[test]
fn only_a_valid_resize_of_a_booted_vm_writes_events() {
    let (mut control, monitor, mut file) = watched(Options::default());
    let resize = |bytes| Call::Resize(VmResize { desired_ram: Some(bytes), ..VmResize::default() });
    control.create(config("")).unwrap();
    control.serve_call(resize(128 << 20)).unwrap();
    control.boot().unwrap();
    control.serve_call(resize(128 << 20)).unwrap();
    control.serve_call(resize(256 << 20)).unwrap_err();
    monitor.flush(Duration::from_secs(60));
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["event"].take());
    let wanted = ["booting", "booted", "resizing", "resized"];
    assert_eq!(events.collect::<Vec<_>>(), wanted);
    control.delete();
}

#[test]
fn ram_grows_within_hotplug_size_and_failed_growth_changes_none() {
    let (mut control, ..) = watched(Options::default());
    let size = |control: &mut Control<Null>| control.created.as_ref().unwrap().config.memory.size >> 20;
    let resize = |control: &mut Control<Null>, mib: u64| {
        let resized =
            control.serve_call(Call::Resize(VmResize { desired_ram: Some(mib << 20), ..VmResize::default() }));
        resized.map(|_| ()).map_err(|error| error.to_string())
    };
    let wanted = |cmdline| {
        let mut config = unchecked(cmdline);
        config.memory.hotplug_size = 256 << 20;
        config.check().unwrap()
    };
    control.create(wanted("")).unwrap();
    control.boot().unwrap();
    let booted = size(&mut control);
    resize(&mut control, booted + 128).unwrap();
    assert_eq!(size(&mut control), booted + 128);
    assert!(resize(&mut control, booted).unwrap_err().contains("bytes are less than the"));
    assert!(
        resize(&mut control, booted + 384)
            .unwrap_err()
            .ends_with("memory.hotplug_size leaves room for only 134217728 bytes")
    );
    resize(&mut control, booted + 256).unwrap();
    assert_eq!(size(&mut control), booted + 256);
    control.delete();
    control.create(wanted("fail-ram")).unwrap();
    control.boot().unwrap();
    assert_eq!(resize(&mut control, booted + 128), Err("cannot add RAM: none is left".into()));
    assert_eq!(size(&mut control), booted);
    control.delete();
}

/// Creates and boots a VM that has 2 vCPUs and may have at most 4.
fn with_vcpus(cmdline: &str) -> (Control<Null>, File) {
    let (mut control, _, file) = watched(Options::default());
    let mut config = unchecked(cmdline);
    (config.cpus.boot_vcpus, config.cpus.max_vcpus) = (2, 4);
    config.memory.hotplug_size = 256 << 20;
    control.create(config.check().unwrap()).unwrap();
    control.boot().unwrap();
    (control, file)
}

fn want(control: &mut Control<Null>, vcpus: u32, mib: Option<u64>) -> Result<(), String> {
    let size = VmResize { desired_vcpus: Some(vcpus), desired_ram: mib.map(|mib| mib << 20), ..VmResize::default() };
    control.serve_call(Call::Resize(size)).map(|_| ()).map_err(|error| error.to_string())
}

/// Returns the number of wanted vCPUs, the number of present vCPUs, and the MiB of RAM.
fn size(control: &Control<Null>) -> (u32, u32, u64) {
    let created = control.created.as_ref().unwrap();
    let has = created.booted.as_ref().map_or(0, |booted| booted.vm.vcpus.0);
    (created.config.cpus.boot_vcpus, has, created.config.memory.size >> 20)
}

#[test]
fn vcpus_are_added_at_once_and_removed_once_released() {
    let (mut control, file) = with_vcpus("");
    want(&mut control, 4, None).unwrap();
    assert_eq!(size(&control), (4, 4, 64));
    want(&mut control, 2, None).unwrap();
    // The configuration contains the wanted number of vCPUs.
    assert_eq!(size(&control), (2, 4, 64));
    let leaving = "vCPU 2 is about to be removed, and the guest has not released it yet: try again later";
    assert_eq!(want(&mut control, 3, None), Err(leaving.into()));
    want(&mut control, 2, None).unwrap();
    want(&mut control, 1, None).unwrap();
    guest(&mut control, GuestEvent::Left);
    assert_eq!(size(&control), (1, 1, 64));
    control.pause().unwrap();
    want(&mut control, 3, None).unwrap();
    assert_eq!(size(&control), (3, 3, 64));
    control.resume().unwrap();
    let seen = events(&control.monitor, &file).into_iter().filter(|(name, _)| name == "resized").count();
    assert_eq!(seen, 5);
    control.shut_down();
    want(&mut control, 2, None).unwrap();
    control.boot().unwrap();
    assert_eq!(size(&control), (2, 2, 64));
    control.delete();
}

#[test]
fn resize_that_breaks_a_rule_changes_neither_vcpus_nor_ram() {
    let (mut control, file) = with_vcpus("");
    for (vcpus, mib, wanted) in [
        (0, Some(192), "desired_vcpus: 0 is not between 1 and 4 (cpus.max_vcpus)"),
        (5, Some(192), "desired_vcpus: 5 is not between 1 and 4 (cpus.max_vcpus)"),
        (3, Some(100), "desired_ram: "),
        (3, Some(448), "desired_ram: "),
    ] {
        let refused = want(&mut control, vcpus, mib).unwrap_err();
        assert!(refused.starts_with(wanted), "{refused}");
        assert_eq!(size(&control), (2, 2, 64));
    }
    want(&mut control, 1, None).unwrap();
    assert!(want(&mut control, 2, Some(192)).unwrap_err().starts_with("vCPU 1 is about to be removed"));
    assert_eq!(size(&control), (1, 2, 64));
    let seen = events(&control.monitor, &file).into_iter().filter(|(name, _)| name == "resizing").count();
    assert_eq!(seen, 1);
    control.delete();
}

#[test]
fn added_ram_stays_if_adding_vcpus_fails() {
    let (mut control, _file) = with_vcpus("fail-vcpus");
    assert_eq!(want(&mut control, 3, Some(192)), Err("cannot vcpus".into()));
    assert_eq!(size(&control), (2, 2, 192));
    control.delete();
}

#[test]
fn balloon_keeps_the_last_valid_requested_size() {
    let (mut control, ..) = watched(Options::default());
    let resize = |control: &mut Control<Null>, bytes| {
        let size = VmResize { desired_balloon: Some(bytes), ..VmResize::default() };
        control.serve_call(Call::Resize(size)).map(|_| ()).map_err(|error| error.to_string())
    };
    let size = |control: &Control<Null>| control.created.as_ref().unwrap().config.balloon.as_ref().unwrap().size;
    control.create(config("")).unwrap();
    control.boot().unwrap();
    assert_eq!(resize(&mut control, 0), Ok(()));
    assert!(resize(&mut control, 4096).unwrap_err().ends_with("the VM has no balloon"));
    control.delete();
    let mut wanted = unchecked("");
    wanted.balloon = Some("size=8M".parse().unwrap());
    control.create(wanted.check().unwrap()).unwrap();
    resize(&mut control, 16 << 20).unwrap();
    control.boot().unwrap();
    assert_eq!(size(&control), 16 << 20);
    resize(&mut control, 0).unwrap();
    assert!(resize(&mut control, 1 << 40).unwrap_err().contains("desired_balloon: "));
    assert_eq!(size(&control), 0);
    control.delete();
}

#[test]
fn disk_is_resized_if_the_vm_is_booted_and_has_it() {
    let (mut control, ..) = watched(Options::default());
    let resize = |control: &mut Control<Null>, id: &str, desired_size| {
        let resized = control.serve_call(Call::ResizeDisk(VmResizeDisk { id: id.into(), desired_size }));
        resized.map(|_| ()).map_err(|error| error.to_string())
    };
    assert!(resize(&mut control, "disk", 512).unwrap_err().starts_with("no VM is created"));
    let mut wanted = unchecked("");
    wanted.add("path=/i,id=disk".parse::<DiskConfig>().unwrap().to_part()).unwrap();
    control.create(wanted.check().unwrap()).unwrap();
    let refused = resize(&mut control, "disk", 512).unwrap_err();
    assert_eq!(refused, "the VM is created, but not booted: vm.resize-disk needs a VM that is booted (vm.boot)");
    control.boot().unwrap();
    assert_eq!(resize(&mut control, "disk", 512), Ok(()));
    assert_eq!(resize(&mut control, "disk", 0), Err("desired_size: none is left".into()));
    for other in ["_rng", "", "a\nb"] {
        let refused = resize(&mut control, other, 512).unwrap_err();
        assert!(refused.starts_with("there is no disk '") && !refused.contains('\n'), "{refused}");
    }
    // A disk that the guest was asked to release counts as removed.
    control.remove_device("disk").unwrap();
    assert_eq!(resize(&mut control, "disk", 512), Err("there is no disk 'disk': vm.info lists the disks".into()));
    control.delete();
}
