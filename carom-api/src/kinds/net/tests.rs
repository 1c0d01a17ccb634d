// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of network device configurations that are accepted or rejected.

use std::fs::File;

use super::*;
use crate::error::Explain;
use crate::field::Terms;
use crate::kinds::PartConfig;

fn net(text: &str) -> NetConfig {
    text.parse().unwrap()
}

#[test]
fn multicast_mac_address_is_refused_in_json() {
    let json = serde_json::from_str::<NetConfig>(r#"{"mac": "01:00:00:00:00:01"}"#).unwrap_err().to_string();
    assert!(json.contains("is not a unicast address"), "{json}");
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
fn vhost_user_device_needs_shared_memory_and_no_interface() {
    let error = net("vhost_user=on,socket=/s").check(&MemoryConfig::default()).unwrap_err();
    assert_eq!(error.field, NetConfig::VHOST_SOCKET);
    let file = File::open("/dev/null").unwrap();
    let refused = net("vhost_user=on,socket=/s").take_files(vec![file.into()]).unwrap_err();
    assert_eq!(refused.field, NetConfig::VHOST_USER);
    let (one, other) = (net("vhost_user=on,socket=/s"), net("vhost_user=on,socket=/s,num_queues=4"));
    let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
    assert_eq!(one.same_as(other).map(|(field, _)| field), Some(NetConfig::VHOST_SOCKET));
}

#[test]
fn interface_belongs_to_one_device_and_mac_address_is_kept() {
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
        refused.explain(Terms::Json).contains("fds: holds descriptor numbers of the client"),
        "{}",
        refused.explain(Terms::Json)
    );
}
