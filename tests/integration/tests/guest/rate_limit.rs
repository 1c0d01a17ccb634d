// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rate limits of disks: fio in a guest reaches a disk's limit, and two disks of a group share the group's limit.

use std::fs::File;

use carom_integration::Guest;
use carom_integration::harness::guest_test;

use crate::support::{MIB, run};

/// Returns a job that reads from all `disks` for 4 s, and prints the sums of their requests and KiB per second.
fn reads(name: &str, disks: &[&str], block: &str) -> String {
    let jobs: String = disks.iter().map(|disk| format!(" --name={disk} --filename=/dev/{disk}")).collect();
    format!(
        "fio --direct=1 --rw=randread --ioengine=libaio --iodepth=8 --bs={block} --time_based --runtime=4 --size=16M \
         --output-format=terse --terse-version=3{jobs} >/tmp/fio 2>&1 || cat /tmp/fio
awk -F';' '/^3;/ {{ ops += $8; kib += $7 }} END {{ print \"CAROM-{name} \" int(ops) \" \" int(kib) }}' /tmp/fio
"
    )
}

#[guest_test(slow = "unit tests cover limits with a simulated clock, and queues that share a limit")]
fn fio_gets_the_rate_of_its_disks_limit() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        let path = dir.path().join(name);
        File::create_new(&path).unwrap().set_len(16 * MIB).unwrap();
        path.display().to_string()
    };
    let (first, second, third) = (path("first"), path("second"), path("third"));
    let job =
        reads("GROUP", &["vda", "vdb"], "4k") + &reads("ALONE", &["vdb"], "4k") + &reads("BYTES", &["vdc"], "64k");
    let guest = Guest::new("rate-limit")
        .cpus(2)
        .rate_limit_group("id=slow,ops_size=20,ops_refill_time=100")
        .disk(&format!("path={first},rate_limit_group=slow,num_queues=2"))
        .disk(&format!("path={second},rate_limit_group=slow"))
        .disk(&format!("path={third},bw_size=256k,bw_refill_time=100"))
        .job(&job);

    let outcome = run(&guest);

    let reported = |name: &str, place: usize| -> f64 {
        let key = format!("CAROM-{name}");
        let line = outcome.value(&key).unwrap();
        line.split(' ').nth(place).unwrap().parse().unwrap()
    };
    let near = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 0.3, "{got}, not {wanted}");
    near(reported("GROUP", 0), 200.0);
    near(reported("ALONE", 0), 200.0);
    near(reported("BYTES", 1), 2560.0);
}
