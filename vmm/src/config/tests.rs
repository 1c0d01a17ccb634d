// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use super::*;

fn config() -> VmConfig {
    VmConfig {
        payload: PayloadConfig { kernel: "k".into(), ..Default::default() },
        cpus: CpusConfig::default(),
        memory: MemoryConfig::with_size(512 * MIB),
        devices: Vec::new(),
        user_devices: Vec::new(),
        serial: "tty".parse().unwrap(),
        platform: PlatformConfig::default(),
        pvpanic: false,
        iommu_bounce: None,
    }
}

fn refused<T: std::str::FromStr<Err = ConfigError>>(text: &str) -> String {
    text.parse::<T>().err().expect("must be refused").to_string()
}

#[test]
fn arguments_parse_as_cloud_hypervisor_spells_them() {
    assert_eq!("boot=2".parse::<CpusConfig>().unwrap().boot_vcpus, 2);
    assert_eq!("size=2G".parse::<MemoryConfig>().unwrap().size, 2 << 30);
    let device: DeviceConfig = "path=/sys/bus/pci/devices/0000:00:05.0,iommu=on".parse().unwrap();
    assert!(device.iommu);
    assert_eq!(device.path, PathBuf::from("/sys/bus/pci/devices/0000:00:05.0"));
    let serial: ConsoleConfig = "file=/tmp/log".parse().unwrap();
    assert_eq!((serial.mode, serial.file), (ConsoleMode::File, Some("/tmp/log".into())));
}

#[test]
fn bounce_defaults_to_64_mib_and_a_region_as_large() {
    let bounce: IommuBounceConfig = "".parse().unwrap();
    assert_eq!((bounce.size, bounce.max, bounce.threshold, bounce.hugepages), (64 * MIB, 64 * MIB, None, false));
    let bounce: IommuBounceConfig = "size=32M,max=1G,threshold=64K,hugepages=on".parse().unwrap();
    assert_eq!((bounce.size, bounce.max, bounce.threshold), (32 * MIB, 1 << 30, Some(65536)));
    assert!(bounce.hugepages);
}

#[test]
fn malformed_arguments_name_option_and_rule() {
    assert_eq!(refused::<CpusConfig>("boot=two"), "--cpus boot: 'two' is no number of CPUs");
    assert_eq!(refused::<CpusConfig>("most=2"), "--cpus: unknown key 'most', known are: boot, max");
    assert!(refused::<MemoryConfig>("size=12Q").starts_with("--memory size: '12Q' is no size"));
    assert_eq!(refused::<MemoryConfig>("size="), "--memory: 'size=' is needed");
    assert_eq!(refused::<DeviceConfig>("iommu=on"), "--device: 'path=' is needed");
    assert_eq!(refused::<DeviceConfig>("path=/x,iommu=yes"), "--device iommu: 'yes' is neither 'on' nor 'off'");
    assert_eq!(refused::<UserDeviceConfig>("iommu=on"), "--user-device: 'socket=' is needed");
    assert!(refused::<UserDeviceConfig>("socket=/s,id=_x").starts_with("--user-device id: must not"));
    assert!(refused::<UserDeviceConfig>("path=/s").starts_with("--user-device: unknown key 'path'"));
    assert_eq!(refused::<ConsoleConfig>("pty"), "--serial: 'pty' is none of off, null, tty, file=PATH");
    assert!(refused::<IommuBounceConfig>("threshold=0").starts_with("--iommu-bounce threshold: '0'"));
}

#[test]
fn memory_is_private_with_transparent_huge_pages_unless_said_otherwise() {
    let plain: MemoryConfig = "size=64M".parse().unwrap();
    assert_eq!(plain, MemoryConfig::with_size(64 * MIB));
    assert_eq!(plain, serde_json::from_str(r#"{"size":67108864}"#).unwrap());
    let all: MemoryConfig = "size=64M,shared=on,hugepages=on,thp=off".parse().unwrap();
    assert_eq!(all, MemoryConfig { size: 64 * MIB, shared: true, hugepages: true, thp: false });
}

#[test]
fn senseless_memory_sizes_are_refused() {
    for size in [0, MIB, 31 * MIB, 33 * MIB, 512 * MIB + 1, !(2 * MIB - 1)] {
        let mut config = config();
        config.memory.size = size;
        assert_eq!(config.validate().unwrap_err().field, "--memory size", "{size}");
    }
}

#[test]
fn bounce_is_refused_where_all_devices_are_beside_the_iommu() {
    let mut config = config();
    config.iommu_bounce = Some("".parse().unwrap());
    config.clone().prepare().unwrap();
    assert!(config.has_iommu(), "for a device that will come");
    config.devices.push("path=/a".parse().unwrap());
    let error = config.clone().prepare().unwrap_err();
    assert!(error.to_string().contains("--iommu-bounce: ") && error.to_string().contains("to a --device"), "{error}");
    let in_json = error.in_json();
    assert!(in_json.starts_with("iommu_bounce: ") && in_json.contains("iommu of one of devices"), "{in_json}");
    assert!(!in_json.contains("--"), "{in_json}");
    config.complete();
    config.validate().expect("the last device behind it may go while the VM runs");
    config.devices.push("path=/b,iommu=on".parse().unwrap());
    config.devices.iter_mut().for_each(|device| device.id = None);
    config.prepare().unwrap();
}

#[test]
fn devices_that_do_not_fit_are_refused() {
    let fits_with = |pvpanic: bool, behind: usize, beside: usize| {
        let device = |number: usize, iommu| DeviceConfig { path: format!("/{number}").into(), iommu, id: None };
        let devices = (0..behind + beside).map(|number| device(number, number < behind)).collect();
        VmConfig { devices, pvpanic, ..config() }.validate().map_err(|error| error.to_string())
    };
    let fits = |behind, beside| fits_with(false, behind, beside);
    assert_eq!((fits(0, 30), fits(16, 14), fits(1, 14)), (Ok(()), Ok(()), Ok(())));
    assert_eq!(fits(0, 31).unwrap_err(), "--device: at most 30 devices fit on the bus");
    assert_eq!(fits(17, 0).unwrap_err(), "--device: at most 16 devices fit behind the virtio-iommu");
    assert_eq!(fits(1, 15).unwrap_err(), "--device: at most 14 devices with iommu off fit beside the virtio-iommu");
    assert_eq!((fits_with(true, 0, 29), fits_with(true, 16, 13)), (Ok(()), Ok(())));
    assert_eq!(fits_with(true, 0, 30).unwrap_err(), "--device: at most 29 devices fit on the bus");
    assert!(fits_with(true, 1, 14).unwrap_err().contains("at most 13 devices with iommu off"));
}

#[test]
fn bounce_sizes_must_be_whole_chunks_and_max_no_less_than_size() {
    let mut config = config();
    config.devices.push("path=/b,iommu=on".parse().unwrap());
    for (text, field) in [
        ("size=3M", "--iommu-bounce size"),
        ("size=0", "--iommu-bounce size"),
        ("size=64M,max=32M", "--iommu-bounce max"),
        ("size=64M,max=65M", "--iommu-bounce max"),
        ("size=64M,max=64G", "--iommu-bounce max"),
    ] {
        config.iommu_bounce = Some(text.parse().unwrap());
        assert_eq!(config.validate().unwrap_err().field, field, "{text}");
    }
}

#[test]
fn the_same_device_twice_is_refused() {
    let mut config = config();
    config.devices = vec!["path=/a".parse().unwrap(), "path=/a,iommu=on".parse().unwrap()];
    assert_eq!(config.validate().unwrap_err().to_string(), "--device path: /a is given twice");
}

#[test]
fn user_devices_have_names_and_sockets_of_their_own() {
    let mut config = config();
    config.devices = vec!["path=/a,iommu=on,id=x".parse().unwrap()];
    config.user_devices = ["socket=/s,iommu=on", "socket=/t,iommu=on,id=y", "socket=/u,iommu=on"]
        .map(|text| text.parse().unwrap())
        .into();
    config.prepare().unwrap();
    let ids: Vec<_> = config.user_devices.iter().map(|device| device.id.clone().unwrap()).collect();
    assert_eq!(ids, ["_vfio_user0", "y", "_vfio_user1"]);
    config.complete();
    let mut twice = config.clone();
    twice.user_devices[1].id = Some("x".into());
    assert_eq!(twice.validate().unwrap_err().to_string(), "--user-device id: 'x' is given twice");
    config.user_devices[1].socket = "/s".into();
    let error = config.validate().unwrap_err();
    assert_eq!(error.to_string(), "--user-device socket: /s is given twice");
    assert_eq!(error.in_json(), "user_devices.socket: /s is given twice");
}

#[test]
fn user_device_beside_the_iommu_needs_shared_memory() {
    let mut config = config();
    config.user_devices.push("socket=/s".parse().unwrap());
    let error = config.prepare().unwrap_err();
    let in_json = error.in_json();
    assert!(in_json.starts_with("user_devices.iommu: is off") && in_json.contains("memory.shared"), "{in_json}");
    assert!(!in_json.contains("--"), "{in_json}");
    let error = error.to_string();
    assert!(error.starts_with("--user-device iommu: is off") && error.contains("shared=on"), "{error}");
    assert!(!config.has_iommu());
    config.memory.shared = true;
    config.validate().unwrap();
    config.memory = MemoryConfig { hugepages: true, ..MemoryConfig::with_size(512 * MIB) };
    config.validate().unwrap();
    config.memory.hugepages = false;
    config.user_devices[0].iommu = true;
    config.validate().unwrap();
    assert!(config.has_iommu() && config.has_devices());
}

#[test]
fn devices_of_both_kinds_share_the_bus() {
    let mut config = config();
    let device = |number: usize| format!("path=/{number},iommu=on").parse().unwrap();
    config.devices = (0..16).map(device).collect();
    config.validate().unwrap();
    config.user_devices.push("socket=/s,iommu=on".parse().unwrap());
    assert_eq!(config.validate().unwrap_err().rule, "at most 16 devices fit behind the virtio-iommu");
}

#[test]
fn vcpu_count_out_of_range_is_refused() {
    let mut config = config();
    for count in [0, 255, u32::MAX] {
        config.cpus = CpusConfig { boot_vcpus: count, max_vcpus: count };
        assert_eq!(config.validate().unwrap_err().field, "--cpus boot");
    }
}
