// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use super::*;
use crate::error::Explain;
use crate::limits::MIB;

fn config() -> VmConfig {
    VmConfig {
        payload: PayloadConfig::of_kernel("k"),
        serial: SerialConfig::of(ConsoleMode::Tty),
        ..VmConfig::default()
    }
}

fn device(number: usize) -> DeviceConfig {
    format!("path=/{number}").parse().unwrap()
}

fn refused(config: VmConfig) -> ConfigError {
    config.check().expect_err("must be refused")
}

#[test]
fn kernel_alone_makes_a_vm_with_cloud_hypervisors_defaults() {
    let config: VmConfig = serde_json::from_str(r#"{"payload": {"kernel": "/k"}, "devices": null}"#).unwrap();
    let config = config.check().unwrap();
    assert_eq!((config.cpus.boot_vcpus, config.cpus.max_vcpus), (1, 1));
    assert_eq!(config.memory.size, 512 * MIB);
    assert!(config.parts().next().is_none() && !config.has_iommu());
}

#[test]
fn every_part_is_checked() {
    type Change = fn(&mut VmConfig);
    let breaks: [(Change, Field); 6] = [
        (|vm| vm.cpus.boot_vcpus = 0, CpusConfig::BOOT),
        (|vm| (vm.cpus.max_phys_bits, vm.memory.size) = (36, 64 << 30), CpusConfig::MAX_PHYS_BITS),
        (|vm| vm.memory.size = 1, MemoryConfig::SIZE),
        (|vm| vm.serial.mode = ConsoleMode::File, SerialConfig::OPTION.key("file")),
        (|vm| vm.payload.cmdline = "x".repeat(1 << 16), PayloadConfig::CMDLINE),
        (|vm| vm.iommu_bounce = "size=3M".parse().ok(), IommuBounceConfig::SIZE),
    ];
    for (change, field) in breaks {
        let mut wrong = config();
        change(&mut wrong);
        assert_eq!(refused(wrong).field, field);
    }
}

#[test]
fn maximum_of_vcpus_defaults_to_those_at_boot() {
    let mut config = config();
    config.cpus = CpusConfig { max_vcpus: 0, ..CpusConfig::with_count(3) };
    assert_eq!(config.check().unwrap().cpus.max_vcpus, 3);
}

#[test]
fn bounce_windows_need_a_device_behind_the_iommu() {
    let mut config = config();
    config.iommu_bounce = Some("".parse().unwrap());
    assert!(config.clone().check().unwrap().has_iommu(), "for a device added later");
    config.rng = Some("".parse().unwrap());
    assert!(config.clone().check().unwrap().has_iommu(), "an emulated device does not matter");
    config.devices.push("path=/a".parse().unwrap());
    let error = refused(config.clone());
    assert_eq!(
        error.to_string(),
        "--iommu-bounce: needs a device behind the virtio-iommu: add ',iommu=on' to a --device, --user-device, --disk, --net, --pmem, --rng, --vsock or --console"
    );
    let json = error.explain(Terms::Json);
    assert!(
        json.starts_with("iommu_bounce: ")
            && json.contains("iommu of one of devices, user_devices, disks, net, pmem, rng, vsock or console"),
        "{json}"
    );
    assert!(!json.contains("--"), "{json}");
    config.clone().check_again().expect("the last device behind it may be removed while the VM runs");
    config.devices.push("path=/b,iommu=on".parse().unwrap());
    config.check().unwrap();
}

#[test]
fn too_many_devices_are_refused() {
    let fits_with = |pvpanic: bool, behind: usize, beside: usize| {
        let device = |number: usize| DeviceConfig { iommu: number < behind, ..device(number) };
        let devices = (0..behind + beside).map(device).collect();
        VmConfig { devices, pvpanic, ..config() }.check().map(drop).map_err(|error| error.to_string())
    };
    let fits = |behind, beside| fits_with(false, behind, beside);
    assert_eq!((fits(0, 30), fits(16, 14), fits(1, 14)), (Ok(()), Ok(()), Ok(())));
    assert_eq!(
        fits(0, 31).unwrap_err(),
        "--device: at most 30 devices fit on the bus, but there are 31 of --device: use fewer devices, or another PCI segment"
    );
    assert_eq!(
        fits(17, 0).unwrap_err(),
        "--device: at most 16 devices fit behind the virtio-iommu, but there are 17 of --device: use fewer devices, or another PCI segment"
    );
    let refused_beside = fits(1, 15).unwrap_err();
    let rule = "at most 14 devices with iommu off fit on the bus, but there are 15 of --device: use fewer devices, or another PCI segment";
    assert_eq!(refused_beside, format!("--device: {rule}"));
    let watchdog = VmConfig { watchdog: true, pvpanic: true, ..config() };
    let devices = |count: usize| (0..count).map(device).collect();
    assert!(VmConfig { devices: devices(28), ..watchdog.clone() }.check().is_ok());
    let many = refused(VmConfig { devices: devices(29), ..watchdog });
    assert_eq!(
        many.to_string(),
        "--device: at most 28 devices fit on the bus, but there are 29 of --device: use fewer devices, or another PCI segment"
    );
    assert_eq!((fits_with(true, 0, 29), fits_with(true, 16, 13)), (Ok(()), Ok(())));
    assert_eq!(
        fits_with(true, 0, 30).unwrap_err(),
        "--device: at most 29 devices fit on the bus, but there are 30 of --device: use fewer devices, or another PCI segment"
    );
    assert!(fits_with(true, 1, 14).unwrap_err().contains("at most 13 devices with iommu off"));
}

#[test]
fn each_segment_has_slots_of_its_own() {
    let fits = |platform: &str, devices: &[(u16, bool, usize)]| {
        let mut config = VmConfig { platform: platform.parse().unwrap(), ..config() };
        for (pci_segment, iommu, count) in devices {
            let first = config.devices.len();
            let device = |number| DeviceConfig { iommu: *iommu, pci_segment: *pci_segment, ..device(number) };
            config.devices.extend((first..first + count).map(device));
        }
        config.check().map(|config| config.count(1)).map_err(|error| error.to_string())
    };
    assert_eq!(fits("num_pci_segments=2", &[(0, false, 30), (1, false, 31)]), Ok((0, 31)));
    let refused = fits("num_pci_segments=2", &[(1, false, 32)]).unwrap_err();
    assert_eq!(
        refused,
        "--device: at most 31 devices fit on the bus on segment 1, but there are 32 of --device: use fewer devices, or another PCI segment"
    );
    assert_eq!(
        fits("num_pci_segments=2", &[(0, true, 16), (0, false, 14), (1, true, 17), (1, false, 14)]),
        Ok((17, 14))
    );
    let refused = fits("num_pci_segments=2", &[(1, true, 18)]).unwrap_err();
    assert_eq!(
        refused,
        "--device: at most 17 devices fit behind the virtio-iommu on segment 1, but there are 18 of --device: use fewer devices, or another PCI segment"
    );
    // All devices of a segment in `iommu_segments` are behind the virtio-iommu.
    assert_eq!(fits("num_pci_segments=2,iommu_segments=1", &[(0, false, 14), (1, false, 31)]), Ok((31, 0)));
    assert_eq!(fits("iommu_segments=0", &[(0, false, 30)]), Ok((0, 0)));
    let refused = fits("iommu_segments=0", &[(0, false, 31)]).unwrap_err();
    assert_eq!(
        refused,
        "--device: at most 30 devices fit behind the virtio-iommu, but there are 31 of --device: use fewer devices, or another PCI segment"
    );
    let refused = fits("num_pci_segments=2", &[(2, false, 1)]).unwrap_err();
    assert_eq!(
        refused,
        "--device pci_segment: segment 2 does not exist: the last segment is 1; raise --platform num_pci_segments for more segments"
    );
}

#[test]
fn device_added_to_an_iommu_segment_is_behind_the_iommu() {
    let platform = "num_pci_segments=2,iommu_segments=1".parse().unwrap();
    let mut config = VmConfig { platform, ..config() };
    assert!(config.has_iommu() && config.has_use_for_windows());
    let mut add = |text: &str| config.add(text.parse().map(PartConfig::Disk).unwrap()).unwrap().is_behind_iommu();
    assert_eq!((add("path=/a"), add("path=/b,pci_segment=1")), (false, true));
    let rng = VmConfig { rng: Some("pci_segment=1".parse().unwrap()), ..config };
    assert!(rng.check_again().unwrap().rng.as_ref().unwrap().iommu);
}

#[test]
fn second_weight_of_a_segment_is_refused() {
    let weights = ["pci_segment=0", "pci_segment=0,mmio32_aperture_weight=2"];
    let pci_segments = weights.iter().map(|text| text.parse().unwrap()).collect();
    let error = refused(VmConfig { pci_segments, ..config() });
    assert_eq!(error.explain(Terms::Json), "pci_segments.pci_segment: 0 is given twice: leave one out");
}

#[test]
fn devices_of_all_kinds_share_the_bus() {
    let mut config = config();
    config.devices = (0..16).map(|number| format!("path=/{number},iommu=on").parse().unwrap()).collect();
    config.clone().check().unwrap();
    config.user_devices.push("socket=/s,iommu=on".parse().unwrap());
    let rule = "--device: at most 16 devices fit behind the virtio-iommu, but there are 16 of --device, 1 of --user-device: use fewer devices, or another PCI segment";
    assert_eq!(refused(config).to_string(), rule);
}

#[test]
fn too_many_disks_are_reported_as_disks() {
    let disks = (0..31).map(|number| format!("path=/{number}").parse().unwrap()).collect();
    let error = refused(VmConfig { disks, net: vec!["tap=t".parse().unwrap()], ..config() });
    assert_eq!(
        error.to_string(),
        "--disk: at most 30 devices fit on the bus, but there are 31 of --disk, 1 of --net: use fewer devices, or another PCI segment"
    );
    assert!(
        error.explain(Terms::Json).starts_with("disks: at most 30 devices fit on the bus, but there are 31 of disks")
    );
}

#[test]
fn device_names_and_sources_must_be_unique() {
    let mut config = config();
    config.devices = vec!["path=/a,iommu=on,id=x".parse().unwrap()];
    config.user_devices = ["socket=/s,iommu=on", "socket=/t,iommu=on,id=y", "socket=/u,iommu=on"]
        .map(|text| text.parse().unwrap())
        .into();
    let checked = config.clone().check().unwrap();
    let ids: Vec<_> = checked.parts().filter_map(KindConfig::id).collect();
    assert_eq!(ids, ["x", "_vfio_user0", "y", "_vfio_user1"]);

    let mut twice = config.clone();
    twice.user_devices[1].id = Some("x".into());
    assert_eq!(
        refused(twice).to_string(),
        "--user-device id: 'x' is given twice: use another value for one of the two devices"
    );
    let mut twice = config.clone();
    twice.devices.push("path=/a,iommu=on".parse().unwrap());
    assert_eq!(
        refused(twice).to_string(),
        "--device path: /a is given twice: use another value for one of the two devices"
    );
    config.user_devices[1].socket = "/s".into();
    let error = refused(config);
    assert_eq!(
        error.to_string(),
        "--user-device socket: /s is given twice: use another value for one of the two devices"
    );
    assert_eq!(
        error.explain(Terms::Json),
        "user_devices.socket: /s is given twice: use another value for one of the two devices"
    );
}

#[test]
fn generated_name_is_unique() {
    let checked = VmConfig { devices: vec!["path=/a".parse().unwrap()], ..config() }.check().unwrap();
    let kept = checked.with::<ConfigError>(|config| config.push("path=/b".parse().map(PartConfig::Vfio)?)).unwrap();
    let mut kept = kept.with::<ConfigError>(|config| config.push("path=/c".parse().map(PartConfig::Vfio)?)).unwrap();
    let ids = |config: &VmConfig| config.devices.iter().filter_map(|device| device.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&kept), ["_vfio0", "_vfio1", "_vfio2"]);
    assert_eq!(kept.remove("_vfio1").unwrap().source(), Some("/b".as_ref()));
    assert_eq!(kept.remove("_vfio1"), None);
    let kept = kept.with::<ConfigError>(|config| config.push("path=/b".parse().map(PartConfig::Vfio)?)).unwrap();
    assert_eq!(ids(&kept), ["_vfio0", "_vfio2", "_vfio1"]);
}

#[test]
fn change_that_breaks_a_rule_changes_nothing() {
    let checked = config().check().unwrap();
    let error = checked.with::<ConfigError>(|config| {
        config.memory.size = 3;
        Ok(())
    });
    assert_eq!(error.unwrap_err().field, MemoryConfig::SIZE);
    assert_eq!(checked.memory.size, 512 * MIB);
}

#[test]
fn second_device_of_a_single_kind_is_refused() {
    for kind in KINDS.iter().filter(|kind| kind.bare.is_some()) {
        let part = kind.parse("").unwrap();
        let mut config = config();
        assert_eq!(config.push(part.clone()), Ok(()));
        assert_eq!(config.push(part).is_err(), kind.number == Number::One, "{}", kind.name);
    }
}

#[test]
fn checked_configuration_passes_check_again() {
    let mut config = config();
    config.devices = vec!["path=/a,iommu=on".parse().unwrap()];
    config.iommu_bounce = Some(serde_json::from_str("{}").unwrap());
    let checked = config.check().unwrap();
    let kept: VmConfig = serde_json::from_str(&serde_json::to_string(&*checked).unwrap()).unwrap();
    assert_eq!(kept.clone().check_again(), Ok(checked));
    assert!(kept.check().is_err(), "a user may not give a generated name");
}

#[test]
fn name_with_control_characters_is_always_refused() {
    for id in ["a\0b", "\n", "_disk0\u{85}"] {
        let mut config = config();
        config.rng = Some(RngConfig { id: Some(id.into()), .."".parse().unwrap() });
        assert!(config.clone().check_again().unwrap_err().to_string().contains("must not have control characters"));
        assert!(config.check().is_err(), "{id:?}");
    }
}

#[test]
fn slot_out_of_range_or_given_twice_is_refused() {
    let refused = |disks: &[&str]| {
        let disks = disks.iter().map(|disk| disk.parse().unwrap()).collect();
        let vm = VmConfig { payload: PayloadConfig::of_kernel("/k"), disks, ..VmConfig::default() };
        vm.check().err().map(|error| (error.explain(Terms::Json), error.is_conflict()))
    };
    let is = |rule: &str, conflict| Some((format!("disks.pci_device_id: {rule}"), conflict));
    assert_eq!(refused(&["path=/a,pci_device_id=0"]), is("0 is not between 1 and 31", false));
    assert_eq!(refused(&["path=/a,pci_device_id=32"]), is("32 is not between 1 and 31", false));
    assert_eq!(
        refused(&["path=/a,pci_device_id=7", "path=/b,pci_device_id=7"]),
        is("7 is given twice: use another value for one of the two devices", true)
    );
    assert_eq!(refused(&["path=/a,pci_device_id=1", "path=/b,pci_device_id=31", "path=/c"]), None);
}
