// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Calls of the client, in the order of the test, with the expected results.

/// One call of the client's program.
pub(crate) struct Step {
    /// Verb and arguments.
    pub(crate) arguments: &'static [&'static str],
    /// Status of the answer.
    pub(crate) status: u16,
    /// Expected parts of the answer.
    pub(crate) says: &'static [&'static str],
}

impl Step {
    /// Returns a name for the step's files.
    pub(crate) fn name(&self) -> String {
        let place = STEPS.iter().position(|step| std::ptr::eq(step, self)).unwrap();
        format!("{place:02}-{}", self.arguments[0])
    }
}

const fn done(arguments: &'static [&'static str]) -> Step {
    Step { arguments, status: 204, says: &[] }
}

const fn prints(arguments: &'static [&'static str], says: &'static [&'static str]) -> Step {
    Step { arguments, status: 200, says }
}

const fn refused(arguments: &'static [&'static str], status: u16, says: &'static [&'static str]) -> Step {
    Step { arguments, status, says }
}

/// Calls of verbs that Carom implements. Carom must refuse some of these calls.
pub(crate) static STEPS: &[Step] = &[
    prints(&["ping"], &["\"version\":", "\"pid\":"]),
    refused(&["info"], 404, &["created"]),
    done(&["create", "/tmp/carom-ch-remote-XXXXXX/config.json"]),
    refused(&["create", "/tmp/carom-ch-remote-XXXXXX/config.json"], 500, &["already created"]),
    prints(&["info"], &["\"state\":\"Created\"", "\"memory_actual_size\":67108864"]),
    done(&["boot"]),
    prints(&["info"], &["\"state\":\"Running\""]),
    prints(&["counters"], &["{"]),
    done(&["resize", "--balloon", "1M"]),
    done(&["pause"]),
    prints(&["info"], &["\"state\":\"Paused\""]),
    done(&["snapshot", "file:///tmp/carom-ch-remote-XXXXXX/snapshot"]),
    done(&["resume"]),
    done(&["resize", "--cpus", "1", "--memory", "64M"]),
    refused(&["add-device", "path=/sys/bus/pci/devices/0000:ff:1f.7"], 400, &["0000:ff:1f.7"]),
    refused(&["add-user-device", "socket=/tmp/carom-ch-remote-XXXXXX/none.sock"], 400, &["none.sock"]),
    refused(&["remove-device", "nothing"], 404, &["nothing"]),
    prints(&["add-disk", "path=/tmp/carom-ch-remote-XXXXXX/kernel,id=first"], &["\"id\":\"first\"", "\"bdf\":"]),
    done(&["resize-disk", "--disk", "first", "--size", "4096"]),
    refused(&["resize-disk", "--disk", "nothing", "--size", "4096"], 404, &["nothing"]),
    done(&["remove-device", "first"]),
    prints(
        &[
            "add-disk",
            "path=/tmp/carom-ch-remote-XXXXXX/disk.img,readonly=on,id=more,num_queues=1,queue_size=64,image_type=raw,serial=s1",
        ],
        &["\"id\":\"more\"", "\"bdf\":"],
    ),
    prints(&["add-vsock", "cid=3,socket=/tmp/carom-ch-remote-XXXXXX/vsock.sock"], &["\"id\":\"_vsock\"", "\"bdf\":"]),
    refused(&["add-vsock", "cid=4,socket=/tmp/carom-ch-remote-XXXXXX/more.sock"], 400, &["vsock"]),
    prints(&["info"], &["\"serial\":\"s1\"", "\"cid\":3"]),
    refused(&["add-net", "tap=lo,mac=2e:89:a8:e4:bf:95"], 400, &["net.tap: lo: "]),
    done(&["power-button"]),
    done(&["reboot"]),
    done(&["nmi"]),
    done(&["shutdown"]),
    done(&["boot"]),
    done(&["delete"]),
    done(&["restore", "source_url=file:///tmp/carom-ch-remote-XXXXXX/snapshot,resume=true"]),
    prints(&["info"], &["\"state\":\"Running\""]),
    done(&["shutdown-vmm"]),
];

/// Returns the configuration of the VM whose files are in `directory`.
pub(crate) fn config(directory: &str) -> String {
    serde_json::json!({
        "payload": {"kernel": format!("{directory}/kernel")},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1},
        "memory": {"size": 64 << 20, "shared": true},
        "rng": {"src": "/dev/urandom"},
        "balloon": {"size": 0, "deflate_on_oom": true, "free_page_reporting": true},
        "serial": {"mode": "Null"},
        "console": {"mode": "Off"},
    })
    .to_string()
}
