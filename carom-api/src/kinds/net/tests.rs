// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is taken and refused of a network device.

use std::fs::File;

use super::*;
use crate::error::Explain;
use crate::field::Terms;
use crate::kinds::PartConfig;

fn net(text: &str) -> NetConfig {
    text.parse().unwrap()
}

#[test]
fn address_of_a_group_is_refused_in_json() {
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
    assert_eq!(address("tap=,mac=,ip=,mask="), None);
}

#[test]
fn card_of_a_server_has_no_interface() {
    let on = net("vhost_user=true,socket=/s,vhost_mode=client,num_queues=4");
    let shared = MemoryConfig { shared: true, ..MemoryConfig::default() };
    assert_eq!(on.check(&shared), Ok(()));
    assert_eq!(net("vhost_user=on,socket=/s,iommu=on").check(&shared), Ok(()));
    let error = on.check(&MemoryConfig::default()).unwrap_err();
    assert_eq!(error.field, NetConfig::VHOST_SOCKET);
    assert!(error.explain(Terms::Json).starts_with("net.vhost_socket: "), "{error}");
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
