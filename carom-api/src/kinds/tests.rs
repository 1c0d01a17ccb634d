// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the options of all kinds take and refuse, and what kinds have of their own.

use std::collections::BTreeSet;

use super::*;

/// The kind of an option.
fn kind(option: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.field.option() == option).unwrap()
}

#[test]
fn options_parse_as_cloud_hypervisor_spells_them() {
    for (option, text, json) in [
        ("--device", "path=/sys/d,iommu=on", r#"{"path": "/sys/d", "iommu": true}"#),
        ("--disk", "path=/i.img", r#"{"path": "/i.img"}"#),
        (
            "--disk",
            "path=/i.img,id=,serial=,readonly=,num_queues=",
            r#"{"path": "/i.img", "num_queues": 1, "queue_size": 128, "readonly": false, "image_type": "Unknown"}"#,
        ),
        (
            "--disk",
            "path=/i.img,readonly=on,direct=on,iommu=on,num_queues=4,queue_size=256,serial=x,image_type=qcow2,backing_files=on,sparse=off,lock_granularity=full,bw_size=1,bw_refill_time=2,queue_affinity=[0@[1],3@[5-7]],pci_segment=0,id=d",
            r#"{"path": "/i.img", "readonly": true, "direct": true, "iommu": true, "num_queues": 4, "queue_size": 256,
                "serial": "x", "image_type": "Qcow2", "backing_files": true, "sparse": false, "lock_granularity": "Full",
                "rate_limiter_config": {"bandwidth": {"size": 1, "refill_time": 2}}, "id": "d",
                "queue_affinity": [{"queue_index": 0, "host_cpus": [1]}, {"queue_index": 3, "host_cpus": [5, 6, 7]}]}"#,
        ),
        ("--disk", "path=/i.img,image_type=VHD", r#"{"path": "/i.img", "image_type": "FixedVhd"}"#),
        ("--disk", "vhost_user=on,socket=/s", r#"{"vhost_user": true, "vhost_socket": "/s"}"#),
        ("--disk", "vhost_user=TRUE,vhost_socket=/s", r#"{"vhost_user": true, "vhost_socket": "/s"}"#),
        (
            "--disk",
            "vhost_user=true,vhost_socket=/s,num_queues=2",
            r#"{"vhost_user": true, "vhost_socket": "/s", "num_queues": 2}"#,
        ),
        (
            "--net",
            "",
            r#"{"num_queues": 2, "queue_size": 256, "offload_tso": true, "offload_ufo": true, "offload_csum": true}"#,
        ),
        ("--net", "tap=,mac=,ip=,mask=,mtu=,id=", "{}"),
        (
            "--net",
            "tap=tap0,ip=10.0.0.1,mask=255.255.0.0,mac=02:00:00:00:00:01,host_mac=02:00:00:00:00:02,mtu=9000,iommu=on,num_queues=4,queue_size=512,\
             offload_tso=off,offload_ufo=off,offload_csum=off,pci_segment=0,id=n",
            r#"{"tap": "tap0", "ip": "10.0.0.1", "mask": "255.255.0.0", "mac": "02:00:00:00:00:01",
                "host_mac": "02:00:00:00:00:02", "mtu": 9000, "iommu": true,
                "num_queues": 4, "queue_size": 512, "offload_tso": false, "offload_ufo": false, "offload_csum": false, "id": "n"}"#,
        ),
        ("--net", "ip=fd00:77::1,mask=ffff:ffff:ffff::", r#"{"ip": "fd00:77::1", "mask": "ffff:ffff:ffff::"}"#),
        (
            "--net",
            "vhost_user=true,socket=/s,vhost_mode=client,num_queues=4",
            r#"{"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Client", "num_queues": 4}"#,
        ),
        (
            "--net",
            "vhost_user=on,vhost_socket=/s,num_queues=4",
            r#"{"vhost_user": true, "vhost_socket": "/s", "num_queues": 4}"#,
        ),
        (
            "--fs",
            "tag=t,socket=/s",
            r#"{"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 1024, "iommu": false}"#,
        ),
        (
            "--fs",
            "tag=t,socket=/s,num_queues=2,queue_size=512,pci_segment=1,id=f",
            r#"{"tag": "t", "socket": "/s", "num_queues": 2, "queue_size": 512, "pci_segment": 1, "id": "f"}"#,
        ),
        ("--pmem", "file=/f", r#"{"file": "/f"}"#),
        (
            "--pmem",
            "file=/f,size=4M,iommu=on,discard_writes=on,id=p",
            r#"{"file": "/f", "size": 4194304, "iommu": true, "discard_writes": true, "id": "p"}"#,
        ),
        ("--iommu-bounce", "aperture=high,max=64M", r#"{"aperture": "high", "max": 67108864}"#),
        ("--iommu-bounce", "size=0,max_mapped=96M", r#"{"size": 0, "max_mapped": 100663296}"#),
        ("--rng", "", r#"{"src": "/dev/urandom"}"#),
        (
            "--rng",
            "pci_segment=1,pci_device_id=7,id=r",
            r#"{"src": "/dev/urandom", "pci_segment": 1, "pci_device_id": 7, "id": "r"}"#,
        ),
        ("--rng", "iommu=on", r#"{"iommu": true}"#),
        ("--rng", "src=/dev/hwrng,iommu=off", r#"{"src": "/dev/hwrng"}"#),
        ("--vsock", "cid=3,socket=/run/vm.vsock", r#"{"cid": 3, "socket": "/run/vm.vsock", "iommu": false}"#),
        (
            "--vsock",
            "cid=4294967294,socket=/s,iommu=on,pci_segment=0,id=v",
            r#"{"cid": 4294967294, "socket": "/s", "iommu": true, "id": "v"}"#,
        ),
        ("--balloon", "size=1G", r#"{"size": 1073741824}"#),
        (
            "--balloon",
            "size=0,deflate_on_oom=on,free_page_reporting=on,id=b,pci_segment=1",
            r#"{"size": 0, "deflate_on_oom": true, "free_page_reporting": true, "id": "b", "pci_segment": 1}"#,
        ),
        ("--console", "off", r#"{"mode": "Off"}"#),
        ("--console", "null", r#"{"mode": "Null"}"#),
        ("--console", "tty", r#"{"mode": "Tty", "file": null, "socket": null, "id": null}"#),
        (
            "--console",
            "pty,iommu=on,pci_segment=1,id=c",
            r#"{"mode": "Pty", "iommu": true, "pci_segment": 1, "id": "c"}"#,
        ),
        ("--console", "iommu=on,tty", r#"{"mode": "Tty", "iommu": true}"#),
        ("--console", "file=/f", r#"{"mode": "File", "file": "/f"}"#),
        ("--console", "socket=/s", r#"{"mode": "Socket", "socket": "/s"}"#),
    ] {
        assert_eq!(Ok(kind(option).parse(text).unwrap()), kind(option).read(json.as_bytes()), "{option} {text}");
    }
}

#[test]
fn malformed_options_name_option_and_rule() {
    const MODES: &str = "has not one of off, null, tty, pty, file=PATH, socket=PATH";
    const NO_ADDRESS: &str = "--net ip: is no IP address, such as 192.168.249.1 or fd00::1";
    // Those that end in an ellipsis go on.
    for (option, text, message) in [
        ("--device", "iommu=on", "--device: 'path=' is needed"),
        ("--device", "path=/x,iommu=yes", "--device iommu: 'yes' is neither 'on' nor 'off'"),
        ("--user-device", "iommu=on", "--user-device: 'socket=' is needed"),
        ("--user-device", "path=/s", "--user-device: unknown key 'path'…"),
        ("--disk", "readonly=on", "--disk: 'path=' is needed"),
        ("--disk", "path=/x,direct=yes", "--disk direct: 'yes' is neither 'on' nor 'off'"),
        ("--disk", "path=/x,num_queues=65536", "--disk num_queues: is no number that fits"),
        (
            "--disk",
            "path=/x,image_type=vhdx",
            "--disk image_type: 'vhdx' is none of 'raw', 'qcow2', 'vhd' and 'fixedvhd'",
        ),
        ("--disk", "path=/x,lock_granularity=no", "--disk lock_granularity: 'no' is neither…"),
        ("--disk", "path=/x,pci_segment=-1", "--disk pci_segment: is no number that fits"),
        ("--disk", "path=/x,bw_size=1", "--disk bw_refill_time: is needed for a limit on the rate"),
        ("--disk", "vhost_user=on,socket=/s,vhost_socket=/s", "--disk socket: is given twice, as vhost_socket too"),
        ("--net", "iommu=yes", "--net iommu: 'yes' is neither 'on' nor 'off'"),
        ("--net", "ip=fd00::g", NO_ADDRESS),
        ("--net", "ip=300.1.1.1", NO_ADDRESS),
        ("--net", "ip=1.2.3", NO_ADDRESS),
        ("--net", "ip=10.0.0.1/24", NO_ADDRESS),
        ("--net", "mtu=65536", "--net mtu: is no number that fits"),
        ("--net", "host_mac=01:00:00:00:00:00", "--net host_mac: is an address of a group…"),
        ("--net", "mac=02:00", "--net mac: is no address of the form…"),
        ("--net", "pci_segment=x", "--net pci_segment: is no number that fits"),
        ("--net", "fd=2", "--net fd: '2' is no descriptor above 2"),
        ("--net", "fd=[3,x]", "--net fd: 'x' is no descriptor above 2"),
        ("--net", "fd=[3,4,3]", "--net fd: 3 is given twice"),
        ("--net", "fd=[]", "--net fd: names no descriptor"),
        ("--net", "vhost_user=on,socket=/s,vhost_socket=/s", "--net socket: is given twice, as vhost_socket too"),
        ("--net", "vhost_mode=both", "--net vhost_mode: 'both' is neither 'client' nor 'server'"),
        ("--fs", "socket=/s", "--fs: 'tag=' is needed"),
        ("--fs", "tag=t", "--fs: 'socket=' is needed"),
        ("--fs", "tag=t,socket=/s,num_queues=x", "--fs num_queues: is no number that fits"),
        ("--fs", "tag=t,socket=/s,dax=on", "--fs: unknown key 'dax'…"),
        ("--pmem", "size=2M", "--pmem: 'file=' is needed"),
        ("--iommu-bounce", "threshold=0", "--iommu-bounce threshold: '0' is neither 'auto' nor 1 to 4294967295"),
        ("--iommu-bounce", "aperture=4G", "--iommu-bounce aperture: '4G' is none of 'auto', 'low' and 'high'"),
        ("--rng", "iommu=yes", "--rng iommu: 'yes' is neither 'on' nor 'off'"),
        ("--rng", "source=/x", "--rng: unknown key 'source'…"),
        ("--vsock", "socket=/s", "--vsock: 'cid=' is needed"),
        ("--vsock", "cid=3", "--vsock: 'socket=' is needed"),
        ("--vsock", "cid=three,socket=/s", "--vsock cid: is no number that fits"),
        ("--vsock", "cid=3,socket=/s,pci_segment=65536", "--vsock pci_segment: is no number that fits"),
        ("--vsock", "cid=3,path=/s", "--vsock: unknown key 'path'…"),
        ("--balloon", "deflate_on_oom=on", "--balloon: 'size=' is needed"),
        ("--balloon", "size=much", "--balloon size: …"),
        ("--balloon", "size=0,deflate_on_oom=yes", "--balloon deflate_on_oom: 'yes' is neither 'on' nor 'off'"),
        ("--balloon", "size=0,statistics=on", "--balloon: unknown key 'statistics'…"),
        ("--console", "iommu=on", &format!("--console: 'iommu=on' {MODES}")),
        ("--console", "tty,pty", &format!("--console: 'tty,pty' {MODES}")),
        ("--console", "file=/f,tty", &format!("--console: 'file=/f,tty' {MODES}")),
        ("--console", "file=", &format!("--console: 'file=' {MODES}")),
        ("--console", "file=/f,socket=/s", &format!("--console: 'file=/f,socket=/s' {MODES}")),
        ("--console", "vga", "--console: 'vga' is neither key=value nor one of off, null, tty, pty"),
        ("--console", "tty,iommu=yes", "--console iommu: 'yes' is neither 'on' nor 'off'"),
        ("--console", "pty=/p", "--console: unknown key 'pty'…"),
    ] {
        let refused = kind(option).parse(text).unwrap_err().to_string();
        match message.strip_suffix('…') {
            Some(start) => assert!(refused.starts_with(start), "{refused}"),
            None => assert_eq!(refused, message),
        }
    }
}

#[test]
fn kinds_have_names_options_and_ids_of_their_own() {
    for name in [
        |kind: &Kind| kind.name,
        |kind: &Kind| kind.field.option(),
        |kind: &Kind| kind.field.json(),
        |kind: &Kind| kind.id,
    ] {
        let names: BTreeSet<_> = KINDS.iter().map(|kind| name(kind)).collect();
        assert_eq!(names.len(), KINDS.len(), "{names:?}");
    }
    for kind in KINDS {
        assert!(kind.field.option().starts_with("--") && kind.id.starts_with('_'), "{}", kind.name);
        assert_eq!(kind.name, kind.name.to_lowercase());
        assert!(kind.takes_slot || kind.add.is_none(), "{}: what comes needs a slot", kind.name);
        assert!(!kind.passed_through || kind.iommu.is_some(), "{}: windows are for it", kind.name);
    }
}

#[test]
fn name_of_the_users_is_checked_however_it_is_given() {
    for kind in KINDS.iter().filter(|kind| kind.add.is_some()) {
        let (option, json) = match kind.name {
            "vfio-user" => ("socket=/x", r#""socket": "/x""#),
            "fs" => ("tag=t,socket=/x", r#""tag": "t", "socket": "/x""#),
            "vsock" => ("cid=3,socket=/x", r#""cid": 3, "socket": "/x""#),
            "net" => ("tap=x", r#""tap": "x""#),
            "pmem" => ("file=/x", r#""file": "/x""#),
            _ => ("path=/x", r#""path": "/x""#),
        };
        let refused = kind.parse(&format!("{option},id=_x")).unwrap_err();
        let field = kind.field.key("id");
        assert_eq!(refused.field, field, "{refused}");
        let refused = kind.read(format!(r#"{{{json}, "id": ""}}"#).as_bytes()).unwrap_err();
        assert!(refused.starts_with(&field.name(Terms::Json)), "{refused}");
        let part = kind.parse(&format!("{option},id=x")).unwrap();
        assert_eq!((part.id(), part.kind().name), (Some("x"), kind.name));
        assert_eq!(kind.read(serde_json::to_string(&part).unwrap().as_bytes()), Ok(part));
    }
}
