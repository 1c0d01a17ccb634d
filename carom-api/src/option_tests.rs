// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables of option values. Each line has an option, its value, and the expected outcome.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::{
    CpusConfig, LandlockConfig, MemoryConfig, MemoryZoneConfig, NumaConfig, PciSegmentConfig, PlatformConfig,
    RateLimitGroupConfig, SerialConfig,
};
use crate::field::Terms;
use crate::kinds::{KINDS, Kind};
use crate::{ConfigError, RestoreConfig};

/// Option values in Cloud Hypervisor's syntax, and their JSON form.
const SPELLINGS: &str = r#"
--device path=/sys/d,iommu=on => {"path": "/sys/d", "iommu": true}
--disk path=/i.img => {"path": "/i.img"}
--disk path=/i.img,id=,serial=,readonly=,num_queues= => {"path": "/i.img", "num_queues": 1, "queue_size": 128, "readonly": false, "image_type": "Unknown"}
--disk path=/i.img,readonly=on,direct=on,iommu=on,num_queues=4,queue_size=256,serial=x,image_type=qcow2,backing_files=on,sparse=off,lock_granularity=full,bw_size=1,bw_refill_time=2,queue_affinity=[0@[1],3@[5-7]],pci_segment=0,id=d => {"path": "/i.img", "readonly": true, "direct": true, "iommu": true, "num_queues": 4, "queue_size": 256, "serial": "x", "image_type": "Qcow2", "backing_files": true, "sparse": false, "lock_granularity": "Full", "rate_limiter_config": {"bandwidth": {"size": 1, "refill_time": 2}}, "id": "d", "queue_affinity": [{"queue_index": 0, "host_cpus": [1]}, {"queue_index": 3, "host_cpus": [5, 6, 7]}]}
--disk path=/i.img,image_type=VHD => {"path": "/i.img", "image_type": "FixedVhd"}
--disk vhost_user=on,socket=/s => {"vhost_user": true, "vhost_socket": "/s"}
--disk vhost_user=TRUE,vhost_socket=/s => {"vhost_user": true, "vhost_socket": "/s"}
--disk vhost_user=true,vhost_socket=/s,num_queues=2 => {"vhost_user": true, "vhost_socket": "/s", "num_queues": 2}
--net => {"num_queues": 2, "queue_size": 256, "offload_tso": true, "offload_ufo": true, "offload_csum": true}
--net tap=,mac=,ip=,mask=,mtu=,id= => {}
--net tap=tap0,ip=10.0.0.1,mask=255.255.0.0,mac=02:00:00:00:00:01,host_mac=02:00:00:00:00:02,mtu=9000,iommu=on,num_queues=4,queue_size=512,offload_tso=off,offload_ufo=off,offload_csum=off,pci_segment=0,id=n => {"tap": "tap0", "ip": "10.0.0.1", "mask": "255.255.0.0", "mac": "02:00:00:00:00:01", "host_mac": "02:00:00:00:00:02", "mtu": 9000, "iommu": true, "num_queues": 4, "queue_size": 512, "offload_tso": false, "offload_ufo": false, "offload_csum": false, "id": "n"}
--net ip=fd00:77::1,mask=ffff:ffff:ffff:: => {"ip": "fd00:77::1", "mask": "ffff:ffff:ffff::"}
--net vhost_user=true,socket=/s,vhost_mode=client,num_queues=4 => {"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Client", "num_queues": 4}
--net vhost_user=on,vhost_socket=/s,num_queues=4 => {"vhost_user": true, "vhost_socket": "/s", "num_queues": 4}
--fs tag=t,socket=/s => {"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 1024, "iommu": false}
--fs tag=t,socket=/s,num_queues=2,queue_size=512,pci_segment=1,id=f => {"tag": "t", "socket": "/s", "num_queues": 2, "queue_size": 512, "pci_segment": 1, "id": "f"}
--pmem file=/f => {"file": "/f"}
--pmem file=/f,size=4M,iommu=on,discard_writes=on,id=p => {"file": "/f", "size": 4194304, "iommu": true, "discard_writes": true, "id": "p"}
--iommu-bounce aperture=high,max=64M => {"aperture": "high", "max": 67108864}
--iommu-bounce size=0,max_mapped=96M => {"size": 0, "max_mapped": 100663296}
--rng => {"src": "/dev/urandom"}
--rng pci_segment=1,pci_device_id=7,id=r => {"src": "/dev/urandom", "pci_segment": 1, "pci_device_id": 7, "id": "r"}
--rng iommu=on => {"iommu": true}
--rng src=/dev/hwrng,iommu=off => {"src": "/dev/hwrng"}
--vsock cid=3,socket=/run/vm.vsock => {"cid": 3, "socket": "/run/vm.vsock", "iommu": false}
--vsock cid=4294967294,socket=/s,iommu=on,pci_segment=0,id=v => {"cid": 4294967294, "socket": "/s", "iommu": true, "id": "v"}
--balloon size=1G => {"size": 1073741824}
--balloon size=0,deflate_on_oom=on,free_page_reporting=on,id=b,pci_segment=1 => {"size": 0, "deflate_on_oom": true, "free_page_reporting": true, "id": "b", "pci_segment": 1}
--console off => {"mode": "Off"}
--console null => {"mode": "Null"}
--console tty => {"mode": "Tty", "file": null, "socket": null, "id": null}
--console pty,iommu=on,pci_segment=1,id=c => {"mode": "Pty", "iommu": true, "pci_segment": 1, "id": "c"}
--console iommu=on,tty => {"mode": "Tty", "iommu": true}
--console file=/f => {"mode": "File", "file": "/f"}
--console socket=/s => {"mode": "Socket", "socket": "/s"}
--iommu-bounce => {"size": 67108864, "max": 67108864, "threshold": null, "threshold_write": null, "max_mapped": null, "hugepages": false, "aperture": "auto"}
--iommu-bounce size=32M,max=1G,threshold=64K,max_mapped=96M,hugepages=on => {"size": 33554432, "max": 1073741824, "threshold": 65536, "threshold_write": null, "max_mapped": 100663296, "hugepages": true}
--iommu-bounce threshold=64K,threshold_write=16K => {"max": 67108864, "threshold": 65536, "threshold_write": 16384}
--iommu-bounce threshold=auto,threshold_write=auto => {"max": 67108864, "threshold": null, "threshold_write": null}
--iommu-bounce threshold_write=4K => {"max": 67108864, "threshold": null, "threshold_write": 4096}
--iommu-bounce aperture=low,max=64M => {"aperture": "low", "max": 67108864}
--cpus boot=2 => {"boot_vcpus": 2, "max_vcpus": 2}
--cpus boot=4,max=4,topology=1:4:1:1,max_phys_bits=40,nested=off => {"boot_vcpus": 4, "max_vcpus": 4, "topology": {"threads_per_core": 1, "cores_per_die": 4, "dies_per_package": 1, "packages": 1}, "max_phys_bits": 40, "nested": false}
--cpus boot=1,max=2,affinity=[1@[0,2]] => {"boot_vcpus": 1, "max_vcpus": 2, "affinity": [{"vcpu": 1, "host_cpus": [0, 2]}]}
--cpus affinity=[0@[0-2,255],1@[1,3],7@4] => {"boot_vcpus": 1, "max_vcpus": 1, "affinity": [{"vcpu": 0, "host_cpus": [0, 1, 2, 255]}, {"vcpu": 1, "host_cpus": [1, 3]}, {"vcpu": 7, "host_cpus": [4]}]}
--cpus affinity=[] => {"boot_vcpus": 1, "max_vcpus": 1}
--memory size=64M => {"size": 67108864}
--memory size=1G,shared=on,hugepages=on,hugepage_size=1G,thp=off,prefault=on,reserve=on,hotplug_size=2G,hotplug_method=acpi => {"size": 1073741824, "shared": true, "hugepages": true, "hugepage_size": 1073741824, "thp": false, "prefault": true, "reserve": true, "hotplug_size": 2147483648}
--memory size= => {"size": 536870912}
--memory => {"size": 536870912}
--memory size=64M,hotplug_method=acpi,hotplugged_size=0 => {"size": 67108864}
--memory-zone id=a,size=1G,file=/f,shared=on,host_numa_node=1,prefault=on,reserve=on,mergeable=on => {"id": "a", "size": 1073741824, "file": "/f", "shared": true, "host_numa_node": 1, "prefault": true, "reserve": true, "mergeable": true}
--memory-zone id=a,size=1G,hugepages=on,hugepage_size=1G => {"id": "a", "size": 1073741824, "hugepages": true, "hugepage_size": 1073741824}
--memory-zone id=a,size=1G,hotplug_size=0 => {"id": "a", "size": 1073741824}
--numa guest_numa_id=1,cpus=[1-2,5],distances=[0@15,2@25],memory_zones=[a,b],pci_segments=[1] => {"guest_numa_id": 1, "cpus": [1, 2, 5], "distances": [{"destination": 0, "distance": 15}, {"destination": 2, "distance": 25}], "memory_zones": ["a", "b"], "pci_segments": [1]}
--numa guest_numa_id=0,memory_zones=a => {"guest_numa_id": 0, "cpus": null, "distances": null, "memory_zones": ["a"], "pci_segments": null}
--platform iommu_address_width=40 => {"iommu_address_width_bits": 40}
--platform vmgenid=off => {"vmgenid": false}
--platform iommufd=on,vmgenid=on => {"iommufd": true}
--pci-segment pci_segment=1,mmio32_aperture_weight=8 => {"pci_segment": 1, "mmio32_aperture_weight": 8, "mmio64_aperture_weight": 1}
--rate-limit-group id=g,bw_size=10M,bw_one_time_burst=1M,bw_refill_time=100,ops_size=1000,ops_refill_time=1000 => {"id": "g", "rate_limiter_config": {"bandwidth": {"size": 10485760, "one_time_burst": 1048576, "refill_time": 100}, "ops": {"size": 1000, "refill_time": 1000}}}
--rate-limit-group id=g,ops_size=1,ops_one_time_burst=5,ops_refill_time=1 => {"id": "g", "rate_limiter_config": {"ops": {"size": 1, "one_time_burst": 5, "refill_time": 1}}}
--serial file=/tmp/log => {"mode": "File", "file": "/tmp/log"}
--serial socket=/s => {"mode": "Socket", "socket": "/s"}
--serial pty => {"mode": "Pty"}
--serial file="/a,b" => {"mode": "File", "file": "/a,b"}
--restore source_url=file:///a/b,prefault=on,resume=on => {"source_url": "file:///a/b", "prefault": true, "resume": true}
--restore source_url=file:///a,memory_restore_mode=ondemand,zone_updates=[x@1] => {"source_url": "file:///a", "memory_restore_mode": "OnDemand", "zone_updates": [{"id": "x", "host_numa_node": 1}]}
"#;

/// Malformed options and their messages. A `…` at the end of a message stands for any text.
const MALFORMED: &str = r#"
--device iommu=on => --device: 'path=' is required
--device path=/x,iommu=yes => --device iommu: 'yes' is neither 'on' nor 'off'
--user-device iommu=on => --user-device: 'socket=' is required
--user-device path=/s => --user-device: unknown key 'path'…
--disk readonly=on => --disk: 'path=' is required
--disk path=/x,direct=yes => --disk direct: 'yes' is neither 'on' nor 'off'
--disk path=/x,num_queues=65536 => --disk num_queues: '65536' is not a whole number from 0 to 65535
--disk path=/x,image_type=vhdx => --disk image_type: 'vhdx' is not one of 'raw', 'qcow2', 'vhd' or 'fixedvhd'
--disk path=/x,lock_granularity=no => --disk lock_granularity: 'no' is neither…
--disk path=/x,pci_segment=-1 => --disk pci_segment: '-1' is not a whole number from 0 to 65535
--disk path=/x,bw_size=1 => --disk bw_refill_time: is required: a rate limit needs a size and a refill time
--disk vhost_user=on,socket=/s,vhost_socket=/s => --disk socket: is given twice, as socket and as vhost_socket: leave one out
--net iommu=yes => --net iommu: 'yes' is neither 'on' nor 'off'
--net ip=fd00::g => --net ip: is not an IP address, such as 192.168.249.1 or fd00::1
--net ip=300.1.1.1 => --net ip: is not an IP address, such as 192.168.249.1 or fd00::1
--net ip=1.2.3 => --net ip: is not an IP address, such as 192.168.249.1 or fd00::1
--net ip=10.0.0.1/24 => --net ip: is not an IP address, such as 192.168.249.1 or fd00::1
--net mtu=65536 => --net mtu: '65536' is not a whole number from 0 to 65535
--net host_mac=01:00:00:00:00:00 => --net host_mac: is not a unicast address…
--net mac=02:00 => --net mac: is not an address of the form…
--net pci_segment=x => --net pci_segment: 'x' is not a whole number from 0 to 65535
--net fd=2 => --net fd: '2' is not a descriptor number above 2
--net fd=[3,x] => --net fd: 'x' is not a descriptor number above 2
--net fd=[3,4,3] => --net fd: 3 is given twice: every pair of queues needs its own descriptor
--net fd=[] => --net fd: must name at least one descriptor
--net vhost_user=on,socket=/s,vhost_socket=/s => --net socket: is given twice, as socket and as vhost_socket: leave one out
--net vhost_mode=both => --net vhost_mode: 'both' is neither 'client' nor 'server'
--fs socket=/s => --fs: 'tag=' is required
--fs tag=t => --fs: 'socket=' is required
--fs tag=t,socket=/s,num_queues=x => --fs num_queues: 'x' is not a whole number from 0 to 65535
--fs tag=t,socket=/s,dax=on => --fs: unknown key 'dax'…
--pmem size=2M => --pmem: 'file=' is required
--iommu-bounce threshold=0 => --iommu-bounce threshold: '0' is neither 'auto' nor a size of 1 to 4294967295 bytes
--iommu-bounce threshold_write=4G => --iommu-bounce threshold_write: '4G' is neither 'auto' nor a size of 1 to 4294967295 bytes
--iommu-bounce aperture=4G => --iommu-bounce aperture: '4G' is not one of 'auto', 'low' or 'high'
--rng iommu=yes => --rng iommu: 'yes' is neither 'on' nor 'off'
--rng source=/x => --rng: unknown key 'source'…
--vsock socket=/s => --vsock: 'cid=' is required
--vsock cid=3 => --vsock: 'socket=' is required
--vsock cid=three,socket=/s => --vsock cid: 'three' is not a whole number from 0 to 18446744073709551615
--vsock cid=3,socket=/s,pci_segment=65536 => --vsock pci_segment: '65536' is not a whole number from 0 to 65535
--vsock cid=3,path=/s => --vsock: unknown key 'path'…
--balloon deflate_on_oom=on => --balloon: 'size=' is required
--balloon size=much => --balloon size: …
--balloon size=0,deflate_on_oom=yes => --balloon deflate_on_oom: 'yes' is neither 'on' nor 'off'
--balloon size=0,statistics=on => --balloon: unknown key 'statistics'…
--console iommu=on => --console: 'iommu=on' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--console tty,pty => --console: 'tty,pty' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--console file=/f,tty => --console: 'file=/f,tty' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--console file= => --console: 'file=' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--console file=/f,socket=/s => --console: 'file=/f,socket=/s' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--console vga => --console: 'vga' is neither key=value nor one of off, null, tty, pty
--console tty,iommu=yes => --console iommu: 'yes' is neither 'on' nor 'off'
--console pty=/p => --console: unknown key 'pty'…
--cpus boot=two => --cpus boot: 'two' is not a number of CPUs: write a number from 1 to 254
--cpus most=2 => --cpus: unknown key 'most'; known keys: boot, max, topology, max_phys_bits, nested, affinity
--cpus boot=2,max_phys_bits=-1 => --cpus max_phys_bits: '-1' is not a number of bits: write a number such as 46
--cpus boot=2,topology=1:2:1 => --cpus topology: '1:2:1' must be four numbers THREADS:…
--cpus affinity=[x@[1]] => --cpus affinity: 'x' is not a whole number from 0 to…
--cpus affinity=[0@[1,x]] => --cpus affinity: '[1,x]' must be a number from 0 to 65535, or…
--cpus affinity=[0] => --cpus affinity: '[0]' is not a list of pairs…
--memory size=12Q => --memory size: '12Q' is not a size…
--memory size=64M,hotplug_method=virtio-mem => --memory hotplug_method: 'virtio-mem' is not supported: leave the key out; RAM is hot-plugged…
--memory-zone size=1G => --memory-zone: 'id=' is required
--memory-zone id=a => --memory-zone: 'size=' is required
--memory-zone id=a,size=1G,hotplug_size=1G => --memory-zone hotplug_size: '1G' is not supported…
--numa cpus=0 => --numa: 'guest_numa_id=' is required
--numa guest_numa_id=0,distances=[1@256] => --numa distances: '256' is not a whole number from 0 to 255
--platform vmgenid=1 => --platform vmgenid: '1' is neither 'on' nor 'off'
--platform num_pci_segments=two => --platform num_pci_segments: 'two' is not a number of segments: write a number from 1 to 16
--platform iommu_segments=[x] => --platform iommu_segments: '[x]' must be a number from 0 to 65535, or a list of numbers such as [0,2-4]
--pci-segment mmio32_aperture_weight=1 => --pci-segment: 'pci_segment=' is required
--rate-limit-group bw_size=1,bw_refill_time=1 => --rate-limit-group: 'id=' is required
--rate-limit-group id=g => --rate-limit-group: has no limit: give bw_size and bw_refill_time, or ops_size and ops_refill_time
--rate-limit-group id=g,bw_size=1 => --rate-limit-group bw_refill_time: is required: a rate limit needs a size and a refill time
--rate-limit-group id=g,ops_refill_time=1 => --rate-limit-group ops_size: is required: a rate limit needs a size and a refill time
--rate-limit-group id=g,ops_one_time_burst=1 => --rate-limit-group ops_size: is required: a rate limit needs a size and a refill time
--rate-limit-group id=g,bw_size=1,bw_refill_time=x => --rate-limit-group bw_refill_time: 'x' is not a whole number from 0 to…
--serial pipe => --serial: 'pipe' is neither key=value nor one of off, null, tty, pty
--serial socket => --serial: 'socket' is neither key=value nor one of off, null, tty, pty
--serial pty=/p => --serial: unknown key 'pty'; known keys: file, socket
--serial socket= => --serial: 'socket=' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--serial pty,file=/f => --serial: 'pty,file=/f' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH
--landlock-rules access=r => --landlock-rules: 'path=' is required
--landlock-rules path=/p => --landlock-rules: 'access=' is required
--landlock-rules path=/p,access=rx => --landlock-rules access: 'rx' is not one of r, w, rw
--restore source_url=/a => --restore source_url: '/a' must be file:///PATH
--restore prefault=on => --restore: 'source_url=' is required
--restore source_url=file:///a,prefault=yes => --restore prefault: 'yes' is neither 'on' nor 'off'
--restore source_url=file:///a,memory_restore_mode=x => --restore memory_restore_mode: 'x' is neither 'copy' nor 'ondemand'
"#;

/// Device options, each with the JSON field that the error names. `-` means that the device breaks no rule.
const CHECKED: &str = r#"
--disk path=/x,num_queues=0 => num_queues
--disk path=/x,num_queues=65 => num_queues
--disk path=/x,queue_size=2 => queue_size
--disk path=/x,queue_size=100 => queue_size
--disk path=/x,queue_size=2048 => queue_size
--disk path=/x,serial=123456789012345678901 => serial
--disk path=/x,rate_limit_group=g,ops_size=1,ops_refill_time=1 => rate_limit_group
--disk path=/x,queue_affinity=[1@[0]] => queue_affinity
--disk path=/x,num_queues=2,queue_affinity=[1@[0],1@[0]] => queue_affinity
--disk path=/x,num_queues=64,queue_size=1024,serial=12345678901234567890 => -
--disk path=/x,vhost_socket=/s => vhost_socket
--disk vhost_user=on => vhost_user
--disk vhost_user=on,vhost_socket=/s => -
--disk vhost_user=on,vhost_socket=/s,iommu=on => -
--disk vhost_user=on,vhost_socket=/s,path=/x => path
--disk vhost_user=on,vhost_socket=/s,readonly=on => readonly
--disk vhost_user=on,vhost_socket=/s,direct=on => direct
--disk vhost_user=on,vhost_socket=/s,serial=x => serial
--disk vhost_user=on,vhost_socket=/s,backing_files=on => backing_files
--disk vhost_user=on,vhost_socket=/s,sparse=off => sparse
--disk vhost_user=on,vhost_socket=/s,ops_size=1,ops_refill_time=1 => rate_limiter_config
--disk vhost_user=on,vhost_socket=/s,rate_limit_group=g => rate_limit_group
--disk vhost_user=on,vhost_socket=/s,queue_affinity=[0@[0]] => queue_affinity
--disk vhost_user=on,vhost_socket=/s,num_queues=65 => num_queues
--net num_queues=0 => num_queues
--net num_queues=3 => num_queues
--net num_queues=66 => num_queues
--net queue_size=16 => queue_size
--net queue_size=100 => queue_size
--net mtu=67 => mtu
--net tap=sixteen-bytes-xx => tap
--net tap=tap%d => tap
--net tap=.. => tap
--net mask=255.255.255.0 => mask
--net ip=10.0.0.1,mask=255.0.255.0 => mask
--net ip=fd00::1,mask=ffff:0:ffff:: => mask
--net ip=fd00::1,mask=255.255.255.0 => mask
--net ip=10.0.0.1,mask=ffff:: => mask
--net tap=fifteen-bytes-x,num_queues=64,queue_size=1024,mtu=65535,ip=10.0.0.1,mask=0.0.0.0 => -
--net vhost_user=on,socket=/s,num_queues=4 => -
--net vhost_user=on,socket=/s,iommu=on => -
--net vhost_user=on => vhost_user
--net socket=/s => vhost_socket
--net vhost_mode=server => vhost_mode
--net vhost_user=on,socket=/s,vhost_mode=server => vhost_mode
--net vhost_user=on,socket=/s,tap=t => tap
--net vhost_user=on,socket=/s,ip=10.0.0.1 => ip
--net vhost_user=on,socket=/s,mask=255.0.0.0 => mask
--net vhost_user=on,socket=/s,host_mac=02:00:00:00:00:02 => host_mac
--net vhost_user=on,socket=/s,bw_size=1,bw_refill_time=1 => rate_limiter_config
--net vhost_user=on,socket=/s,num_queues=3 => num_queues
--net vhost_user=on,socket=/s,mtu=1 => mtu
--net fd=[3,4],num_queues=2 => fds
--net fd=3,num_queues=4 => fds
--net fd=3,tap=t => tap
--net fd=3,host_mac=02:00:00:00:00:02 => host_mac
--net fd=3,vhost_user=on,socket=/s => vhost_user
--fs tag=1234567890123456789012345678901234567,socket=/s => tag
--fs tag=t,socket=/s,num_queues=0 => num_queues
--fs tag=t,socket=/s,num_queues=64 => num_queues
--fs tag=t,socket=/s,queue_size=2 => queue_size
--fs tag=t,socket=/s,queue_size=100 => queue_size
--fs tag=t,socket=/s,queue_size=2048 => queue_size
--fs tag=t,socket=/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx => socket
--fs tag=t,socket=/s,iommu=on => iommu
--fs tag=123456789012345678901234567890123456,socket=/s => -
--iommu-bounce size=3M => size
--iommu-bounce size=0,max=64M => size
--iommu-bounce max_mapped=0 => max_mapped
--iommu-bounce size=0,max_mapped=4097 => max_mapped
--iommu-bounce size=64M,max=32M => max
--iommu-bounce size=64M,max=65M => max
--iommu-bounce size=64M,max=64G => max
"#;

/// Splits each line of a table into option, value and expected outcome.
fn lines(table: &'static str) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    table.trim().lines().map(|line| {
        let (option, outcome) = line.split_once(" => ").unwrap();
        let (option, value) = option.split_once(' ').unwrap_or((option, ""));
        (option, value, outcome)
    })
}

fn kind(option: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.field.option() == option).unwrap()
}

/// Source of a configuration: an option value, or JSON.
#[derive(Clone, Copy)]
enum Form<'t> {
    Option(&'t str),
    Json(&'t str),
}

fn read_as<T>(form: Form<'_>) -> Result<Value, String>
where
    T: std::str::FromStr<Err = ConfigError> + Serialize + DeserializeOwned,
{
    let read: Result<T, String> = match form {
        Form::Option(text) => text.parse().map_err(|error: ConfigError| error.to_string()),
        Form::Json(text) => serde_json::from_str(text).map_err(|error| error.to_string()),
    };
    read.map(|config| serde_json::to_value(config).unwrap())
}

/// Reads the configuration of an option.
fn read(option: &str, form: Form<'_>) -> Result<Value, String> {
    match option {
        "--cpus" => read_as::<CpusConfig>(form),
        "--memory" => read_as::<MemoryConfig>(form),
        "--memory-zone" => read_as::<MemoryZoneConfig>(form),
        "--numa" => read_as::<NumaConfig>(form),
        "--platform" => read_as::<PlatformConfig>(form),
        "--pci-segment" => read_as::<PciSegmentConfig>(form),
        "--rate-limit-group" => read_as::<RateLimitGroupConfig>(form),
        "--serial" => read_as::<SerialConfig>(form),
        "--landlock-rules" => read_as::<LandlockConfig>(form),
        "--restore" => read_as::<RestoreConfig>(form),
        _ => {
            let part = match form {
                Form::Option(text) => kind(option).parse(text).map_err(|error| error.to_string()),
                Form::Json(text) => kind(option).read(text.as_bytes()),
            };
            part.map(|part| serde_json::to_value(part).unwrap())
        }
    }
}

fn parses_as_cloud_hypervisor_spells_it(option: &str, text: &str, json: &str) {
    let wanted = read(option, Form::Json(json)).unwrap();
    assert_eq!(read(option, Form::Option(text)), Ok(wanted), "{option} {text}");
}

fn is_refused_with_option_and_rule(option: &str, text: &str, message: &str) {
    let refused = read(option, Form::Option(text)).unwrap_err();
    match message.strip_suffix('…') {
        Some(start) => assert!(refused.starts_with(start), "{refused}"),
        None => assert_eq!(refused, message),
    }
}

fn is_checked_beside_shared_ram(option: &str, text: &str, field: &str) {
    let memory = MemoryConfig { shared: true, ..MemoryConfig::default() };
    let refused = kind(option).parse(text).unwrap().check(&memory).err();
    let wanted = (field != "-").then(|| format!("{}.{field}", kind(option).field.json()));
    assert_eq!(refused.map(|error| error.field.name(Terms::Json)), wanted, "{option} {text}");
}

/// Generates a test for each listed option. Another test fails if the table has a line for an option that is not listed, or no line for a
/// listed option.
macro_rules! by_option {
    ($table_tests:ident, $check:ident, $table:ident: $($name:ident $option:literal),*) => {
        mod $table_tests {
            $(
                #[test]
                fn $name() {
                    let of_option = super::lines(super::$table).filter(|(option, ..)| *option == $option);
                    of_option.for_each(|(option, text, outcome)| super::$check(option, text, outcome));
                }
            )*

            #[test]
            fn each_line_is_of_an_option_that_is_tested() {
                let tested = [$($option),*];
                assert!(super::lines(super::$table).all(|(option, ..)| tested.contains(&option)));
                assert!(tested.iter().all(|tested| super::lines(super::$table).any(|(option, ..)| option == *tested)));
            }
        }
    };
}

by_option!(spellings, parses_as_cloud_hypervisor_spells_it, SPELLINGS: device "--device", disk "--disk", net "--net", fs "--fs", pmem "--pmem", iommu_bounce "--iommu-bounce", rng "--rng", vsock "--vsock", balloon "--balloon", console "--console", cpus "--cpus", memory "--memory", memory_zone "--memory-zone", numa "--numa", platform "--platform", pci_segment "--pci-segment", rate_limit_group "--rate-limit-group", serial "--serial", restore "--restore");
by_option!(malformed, is_refused_with_option_and_rule, MALFORMED: device "--device", user_device "--user-device", disk "--disk", net "--net", fs "--fs", pmem "--pmem", iommu_bounce "--iommu-bounce", rng "--rng", vsock "--vsock", balloon "--balloon", console "--console", cpus "--cpus", memory "--memory", memory_zone "--memory-zone", numa "--numa", platform "--platform", pci_segment "--pci-segment", rate_limit_group "--rate-limit-group", serial "--serial", landlock_rules "--landlock-rules", restore "--restore");
by_option!(checked, is_checked_beside_shared_ram, CHECKED: disk "--disk", net "--net", fs "--fs", iommu_bounce "--iommu-bounce");
