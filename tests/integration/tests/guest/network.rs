// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device of which DMA is small, quick and in both directions: a network card, passed through, whose driver has not opted
//! in to bouncing.

use carom_integration::harness::guest_test;
use carom_integration::{Guest, Outcome};

use crate::support::{SITE, number, required, run};

/// MiB that go to the server and come back.
const TRAFFIC_MIB: u64 = 2;

/// Sends random bytes to the server that sends them back, over one connection and in small packets over another, compares,
/// and prints the statistics of the card's pool. `CHOICE` goes to the card's switch first.
const ECHO: &str = r#"
i=0
while [ ! -e /sys/class/net/eth0/device ] && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.1; done
CARD=$(basename "$(readlink -f /sys/class/net/eth0/device)")
echo CHOICE >"/sys/bus/pci/devices/$CARD/iommu_bounce"
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
i=0
while [ "$(cat /sys/class/net/eth0/carrier 2>/dev/null)" != 1 ] && [ $i -lt 200 ]; do i=$((i + 1)); sleep 0.1; done
head -c $((MIB * 1048576)) /dev/urandom >/tmp/sent
start=$(cut -d' ' -f1 /proc/uptime)
nc -w 60 10.0.2.100 7 </tmp/sent >/tmp/back
echo "CAROM-SECONDS $(awk -v start="$start" '{ print $1 - start }' /proc/uptime)"
cmp /tmp/sent /tmp/back && echo CAROM-SAME large
head -c 65536 /tmp/sent >/tmp/part
ip link set eth0 mtu 128
dd if=/tmp/part bs=64 2>/dev/null | nc -w 60 10.0.2.100 7 >/tmp/back
cmp /tmp/part /tmp/back && echo CAROM-SAME small
echo "CAROM-PACKETS $(cat /sys/class/net/eth0/statistics/tx_packets) $(cat /sys/class/net/eth0/statistics/rx_packets)"
sed 's/^/CAROM-STAT-/' $(grep -lx "device $CARD" /sys/kernel/debug/iommu_bounce/*/stats)
"#;

fn echoed(name: &str, choice: &str) -> Outcome {
    let card = required(SITE.net.as_ref(), "a network card (CAROM_NET)");
    let job = ECHO.replace("CHOICE", choice).replace("MIB", &TRAFFIC_MIB.to_string());

    let outcome = run(&Guest::new(name).iommu_device(card).bounce("size=32M").cmdline("iommu.strict=1").job(&job));

    assert_eq!(outcome.values("CAROM-SAME").collect::<Vec<_>>(), ["large", "small"], "{}", outcome.console);
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages");
    let maps = outcome.counters.last().expect("counters at the end").requests.map;
    println!("{name}: {} s, {bounced} bounced, {maps} mapped", outcome.value("CAROM-SECONDS").unwrap());
    outcome
}

#[guest_test(needs(Net), slow = "every_byte_of_a_bounced_network_card_is_right has the harder traffic")]
fn network_card_is_left_alone_by_default() {
    let outcome = echoed("network-auto", "auto");

    assert_eq!(number(&outcome, "CAROM-STAT-bounced_pages"), 0);
    assert_eq!(number(&outcome, "CAROM-STAT-sync_elision_lost"), 0, "its driver's sync calls still cost nothing");
    assert_eq!(number(&outcome, "CAROM-STAT-chunk_adds"), 0);
}

#[guest_test(needs(Net))]
fn every_byte_of_a_bounced_network_card_is_right() {
    let outcome = echoed("network-on", "on");

    // Each packet sent is a mapping or more; those that are received too, unless the driver recycles pages.
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages");
    assert!(bounced > TRAFFIC_MIB * 1_048_576 / 1500, "{bounced} bounced; console:\n{}", outcome.console);
}
