// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is taken and refused of a network device.

use std::fs::File;

use super::*;
use crate::error::Explain;
use crate::field::Terms;

fn net(text: &str) -> NetConfig {
    text.parse().unwrap()
}

#[test]
fn device_parses_as_cloud_hypervisor_spells_it() {
    let plain = net("");
    assert_eq!(plain, serde_json::from_str("{}").unwrap());
    assert_eq!((plain.num_queues, plain.queue_size, plain.offload_tso, plain.iommu), (2, 256, true, false));
    let text = "tap=tap0,ip=10.0.0.1,mask=255.255.0.0,mac=02:00:00:00:00:01,host_mac=02:00:00:00:00:02,mtu=9000,iommu=on,num_queues=4,queue_size=512,\
                offload_tso=off,offload_ufo=off,offload_csum=off,pci_segment=0,id=n";
    let json = r#"{"tap": "tap0", "ip": "10.0.0.1", "mask": "255.255.0.0", "mac": "02:00:00:00:00:01",
        "host_mac": "02:00:00:00:00:02", "mtu": 9000, "iommu": true,
        "num_queues": 4, "queue_size": 512, "offload_tso": false, "offload_ufo": false, "offload_csum": false, "id": "n"}"#;
    assert_eq!(net(text), serde_json::from_str(json).unwrap());
    assert_eq!(net(text).pairs(), 2);
}

#[test]
fn malformed_devices_name_option_and_rule() {
    let refused = |text: &str| text.parse::<NetConfig>().unwrap_err().to_string();
    assert_eq!(refused("iommu=yes"), "--net iommu: 'yes' is neither 'on' nor 'off'");
    for wrong in ["fd00::g", "300.1.1.1", "1.2.3", "10.0.0.1/24"] {
        let rule = "is no IP address, such as 192.168.249.1 or fd00::1";
        assert_eq!(refused(&format!("ip={wrong}")), format!("--net ip: {rule}"));
    }
    assert_eq!(refused("mtu=65536"), "--net mtu: is no number that fits");
    assert!(refused("host_mac=01:00:00:00:00:00").starts_with("--net host_mac: is an address of a group"));
    assert!(refused("mac=02:00").starts_with("--net mac: is no address of the form"));
    assert_eq!(refused("pci_segment=x"), "--net pci_segment: is no number that fits");
    assert_eq!(refused("fd=2"), "--net fd: '2' is no descriptor above 2");
    assert_eq!(refused("fd=[3,x]"), "--net fd: 'x' is no descriptor above 2");
    assert_eq!(refused("fd=[3,4,3]"), "--net fd: 3 is given twice");
    assert_eq!(refused("fd=[]"), "--net fd: names no descriptor");
    let json = serde_json::from_str::<NetConfig>(r#"{"mac": "01:00:00:00:00:01"}"#).unwrap_err().to_string();
    assert!(json.contains("is an address of a group"), "{json}");
}

#[test]
fn queues_name_and_mask_are_checked() {
    let memory = MemoryConfig::default();
    for (text, field) in [
        ("num_queues=0", NetConfig::NUM_QUEUES),
        ("num_queues=3", NetConfig::NUM_QUEUES),
        ("num_queues=66", NetConfig::NUM_QUEUES),
        ("queue_size=16", NetConfig::QUEUE_SIZE),
        ("queue_size=100", NetConfig::QUEUE_SIZE),
        ("mtu=67", NetConfig::MTU),
        ("tap=sixteen-bytes-xx", NetConfig::TAP),
        ("tap=tap%d", NetConfig::TAP),
        ("tap=..", NetConfig::TAP),
        ("mask=255.255.255.0", NetConfig::MASK),
        ("ip=10.0.0.1,mask=255.0.255.0", NetConfig::MASK),
        ("ip=fd00::1,mask=ffff:0:ffff::", NetConfig::MASK),
        ("ip=fd00::1,mask=255.255.255.0", NetConfig::MASK),
        ("ip=10.0.0.1,mask=ffff::", NetConfig::MASK),
    ] {
        let error = net(text).check(&memory).unwrap_err();
        assert_eq!(error.field, field, "{text}");
        assert!(error.explain(Terms::Json).starts_with("net."), "{error}");
    }
    let most = net("tap=fifteen-bytes-x,num_queues=64,queue_size=1024,mtu=65535,ip=10.0.0.1,mask=0.0.0.0");
    assert_eq!(most.check(&memory), Ok(()));
}

#[test]
fn address_of_either_family_has_the_prefix_of_its_mask() {
    let address = |text: &str| {
        let device = net(text);
        assert_eq!(device.check(&MemoryConfig::default()), Ok(()), "{text}");
        device.address().map(|(ip, prefix)| (ip.to_string(), prefix))
    };
    assert_eq!(address("ip=10.0.0.1"), Some(("10.0.0.1".into(), 24)));
    assert_eq!(address("ip=10.0.0.1,mask=255.255.255.128"), Some(("10.0.0.1".into(), 25)));
    assert_eq!(address("ip=10.0.0.1,mask=0.0.0.0"), Some(("10.0.0.1".into(), 0)));
    assert_eq!(address("ip=fd00:77::1"), Some(("fd00:77::1".into(), 64)));
    assert_eq!(address("ip=fd00:77::1,mask=ffff:ffff:ffff::"), Some(("fd00:77::1".into(), 48)));
    assert_eq!(address("ip=fd00::1,mask=::"), Some(("fd00::1".into(), 0)));
    assert_eq!((address("tap=,mac=,ip=,mask="), net("tap=,mac=,ip=,mask=,mtu=,id=")), (None, NetConfig::default()));
    let json = r#"{"ip": "fd00:77::1", "mask": "ffff:ffff:ffff::"}"#;
    assert_eq!(net("ip=fd00:77::1,mask=ffff:ffff:ffff::"), serde_json::from_str(json).unwrap());
}

#[test]
fn card_of_a_server_parses_as_cloud_hypervisor_spells_it() {
    let on = net("vhost_user=true,socket=/s,vhost_mode=client,num_queues=4");
    assert_eq!(net("vhost_user=on,vhost_socket=/s,num_queues=4"), on);
    let json = r#"{"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Client", "num_queues": 4}"#;
    assert_eq!(on, serde_json::from_str(json).unwrap());
    let shared = MemoryConfig { shared: true, ..MemoryConfig::default() };
    assert_eq!(on.check(&shared), Ok(()));
    assert_eq!(net("vhost_user=on,socket=/s,iommu=on").check(&shared), Ok(()));
    let error = on.check(&MemoryConfig::default()).unwrap_err();
    assert_eq!(error.field, NetConfig::VHOST_SOCKET);
    assert!(error.explain(Terms::Json).starts_with("net.vhost_socket: "), "{error}");
    let twice = "vhost_user=on,socket=/s,vhost_socket=/s".parse::<NetConfig>().unwrap_err();
    assert_eq!(twice.to_string(), "--net socket: is given twice, as vhost_socket too");
    let mode = "vhost_mode=both".parse::<NetConfig>().unwrap_err();
    assert_eq!(mode.to_string(), "--net vhost_mode: 'both' is neither 'client' nor 'server'");
    for (text, field) in [
        ("vhost_user=on", NetConfig::VHOST_USER),
        ("socket=/s", NetConfig::VHOST_SOCKET),
        ("vhost_mode=server", NetConfig::VHOST_MODE),
        ("vhost_user=on,socket=/s,vhost_mode=server", NetConfig::VHOST_MODE),
        ("vhost_user=on,socket=/s,tap=t", NetConfig::TAP),
        ("vhost_user=on,socket=/s,ip=10.0.0.1", NetConfig::IP),
        ("vhost_user=on,socket=/s,mask=255.0.0.0", NetConfig::MASK),
        ("vhost_user=on,socket=/s,host_mac=02:00:00:00:00:02", NetConfig::HOST_MAC),
        ("vhost_user=on,socket=/s,bw_size=1,bw_refill_time=1", NetConfig::RATE_LIMIT),
        ("vhost_user=on,socket=/s,num_queues=3", NetConfig::NUM_QUEUES),
        ("vhost_user=on,socket=/s,mtu=1", NetConfig::MTU),
    ] {
        assert_eq!(net(text).check(&shared).unwrap_err().field, field, "{text}");
    }
    let file = File::open("/dev/null").unwrap();
    let refused = net("vhost_user=on,socket=/s").take_files(vec![file.into()]).unwrap_err();
    assert_eq!(refused.field, NetConfig::VHOST_USER);
    let (one, other) = (net("vhost_user=on,socket=/s"), net("vhost_user=on,socket=/s,num_queues=4"));
    let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
    assert_eq!(one.same_as(other).map(|(field, _)| field), Some(NetConfig::VHOST_SOCKET));
}

#[test]
fn interface_belongs_to_one_device_and_a_made_up_address_stays() {
    let conflict = |one: &str, other: &str| {
        let (one, other) = (net(one), net(other));
        let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
        one.same_as(other).map(|(field, _)| field)
    };
    assert_eq!(conflict("tap=a", "tap=a"), Some(NetConfig::TAP));
    assert_eq!((conflict("tap=a", "tap=b"), conflict("", "")), (None, None));
    let mut device = net("");
    device.complete();
    let made = device.mac;
    assert!(made.is_some());
    device.complete();
    assert_eq!(device.mac, made);
}

#[test]
fn descriptors_are_as_many_as_pairs_of_queues() {
    let files = |count| (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect::<Vec<OwnedFd>>();
    let mut device = net("num_queues=4");
    assert_eq!(device.take_files(files(1)).unwrap_err().field, NetConfig::FD);
    assert_eq!(device.take_files(files(2)), Ok(()));
    assert_eq!(device.files.iter().count(), 2);
    assert_eq!((device.clone() == device, net("num_queues=4") == device), (true, false));
    assert_eq!(net("tap=a").take_files(files(1)).unwrap_err().field, NetConfig::TAP);
    let named = net("host_mac=02:00:00:00:00:02").take_files(files(1));
    assert_eq!(named.unwrap_err().field, NetConfig::HOST_MAC);
}

#[test]
fn command_line_descriptors_set_the_queue_count() {
    let memory = MemoryConfig::default();
    for (text, numbers, queues) in [("fd=3", &[3][..], 2), ("fd=[3,4]", &[3, 4], 4), ("fd=[3],num_queues=2", &[3], 2)] {
        let device = net(text);
        assert_eq!((device.inherited.as_slice(), device.num_queues), (numbers, queues), "{text}");
        assert_eq!(device.check(&memory), Ok(()));
        assert!(device.files().is_empty(), "nothing is opened");
    }
    for (text, field) in [
        ("fd=[3,4],num_queues=2", NetConfig::FD),
        ("fd=3,num_queues=4", NetConfig::FD),
        ("fd=3,tap=t", NetConfig::TAP),
        ("fd=3,host_mac=02:00:00:00:00:02", NetConfig::HOST_MAC),
    ] {
        assert_eq!(net(text).check(&memory).unwrap_err().field, field, "{text}");
    }
    let shared = MemoryConfig { shared: true, ..memory };
    let served = net("fd=3,vhost_user=on,socket=/s").check(&shared).unwrap_err();
    assert_eq!(served.field, NetConfig::VHOST_USER);
}

#[test]
fn client_fd_numbers_are_accepted_only_with_passed_descriptors() {
    let read = || match NetConfig::KIND.read(br#"{"fds": [9]}"#).unwrap() {
        PartConfig::Net(device) => device,
        other => panic!("{other:?}"),
    };
    let mut device = read();
    device.take_files(vec![File::open("/dev/null").unwrap().into()]).unwrap();
    assert_eq!(device.check(&MemoryConfig::default()), Ok(()));
    assert!(serde_json::to_value(&device).unwrap().get("fds").is_none());
    let refused = read().check(&MemoryConfig::default()).unwrap_err();
    assert!(
        refused.explain(Terms::Json).contains("fds: are numbers of the client"),
        "{}",
        refused.explain(Terms::Json)
    );
}
