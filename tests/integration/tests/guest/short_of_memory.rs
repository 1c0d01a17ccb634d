// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host that takes memory from a guest while the guest uses its drive: by swapping, by merging equal pages, and by a balloon.
//! Swapping and the balloon split huge pages. Later, the host makes huge pages again.

use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::host_memory::{MemoryGroup, Swap, pages_swapped_in};
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::balloon::resize;
use crate::hotplug::{create_and_boot, end, put};
use crate::support::host_memory::{Collapsing, Merging, huge_pages_cut, in_huge_pages, merged_pages};
use crate::support::{MIB, SITE};

/// Size of the memory whose contents the guest keeps and checks, in MiB.
const KEPT_MIB: u64 = 128;

/// Memory that the host must swap: the test sets a limit that is lower than the VMM's memory by this number of bytes.
const TAKEN: u64 = 96 * MIB;

/// Memory that the guest uses and then frees, and the size of a balloon that takes a part of this memory.
const USED_MIB: u64 = 224;
const LENT_MIB: u64 = 192;

/// Maximum time of each wait while the host is short of memory.
const LIMIT: Duration = Duration::from_secs(180);

/// Returns a job that fills memory and runs `first`. Then it repeatedly verifies I/O on the drive, checks the contents of the
/// memory, and runs `each_time`.
fn keep_memory_and_work(first: &str, each_time: &str) -> String {
    let verify = workload::fio_verify(8, 32);
    format!(
        "{WAIT_FOR_NVME}
dd if=/dev/urandom of=/kept bs=1M count={KEPT_MIB} 2>/dev/null
sum=$(md5sum </kept)
{first}
echo CAROM-READY
n=0
while :; do
    {verify}
    n=$((n + 1))
    if [ \"$(md5sum </kept)\" = \"$sum\" ]; then echo \"CAROM-KEPT $n\"; else echo \"CAROM-LOST $n\"; fi
    {each_time}
done
"
    )
}

fn boot(job: &str, windows: u64, more: Value, before: impl FnOnce(&ApiVmm)) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, job).unwrap();
    before(&vmm);
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"});
    let mut config = json!({"devices": [drive], "iommu_bounce": {"size": windows}});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm
}

fn wait_until(vmm: &ApiVmm, what: &str, done: impl Fn() -> Option<u64>) -> u64 {
    let start = Instant::now();
    loop {
        if let Some(number) = done() {
            return number;
        }
        assert!(start.elapsed() < LIMIT, "{what}:\n{}", vmm.console());
        thread::sleep(Duration::from_millis(100));
    }
}

/// Waits for `rounds` more rounds, and asserts that the data on the drive and in the guest's memory was correct in all rounds.
fn all_is_right(vmm: &ApiVmm, rounds: usize) {
    let done = vmm.console().matches("CAROM-KEPT").count();
    vmm.wait_for("CAROM-KEPT", done + rounds, LIMIT).unwrap();
    let console = vmm.console();
    let (done, sound) = (console.matches("CAROM-KEPT").count(), console.matches("CAROM-VERIFY 0 8388608").count());
    assert!(sound >= done && !console.contains("CAROM-LOST"), "{sound} of {done} rounds were correct:\n{console}");
}

/// Asserts that the guest's virtio-iommu had no fault and rejected no MAP request. If `windows` is true, asserts that chunks
/// are backed, otherwise that no chunk is backed.
fn iommu_is_content(vmm: &ApiVmm, windows: bool) {
    let counted = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"].take();
    for name in ["faults", "failed_map", "failed_map_list"] {
        assert_eq!(counted[name], 0, "{counted}");
    }
    assert_eq!(counted["window_bytes"].as_u64() > Some(0), windows, "{counted}");
}

/// Limits the VMM's memory until the host has swapped much of the guest's memory, while the guest keeps accessing this memory.
fn swapped(windows: u64) {
    let swap = Swap::on(SITE.swap.as_ref().unwrap()).unwrap();
    let group = MemoryGroup::new("carom-short-of-memory").unwrap();
    let job = keep_memory_and_work("", "");
    let vmm = boot(&job, windows, json!({}), |vmm| group.add(vmm.pid()).unwrap());
    all_is_right(&vmm, 1);
    let (used, read_before) = (group.without_a_file().unwrap(), pages_swapped_in().unwrap());
    assert_eq!(group.swapped().unwrap(), 0, "memory was swapped without a limit");
    group.limit(used - TAKEN).unwrap();
    let first = wait_until(&vmm, "too little memory is swapped", || {
        let bytes = group.swapped().unwrap();
        (bytes >= TAKEN * 3 / 4).then_some(bytes)
    });
    all_is_right(&vmm, 3);
    let (last, read) = (group.swapped().unwrap(), pages_swapped_in().unwrap() - read_before);
    tell(&format!(
        "CAROM-SWAPPED of {} MiB {} MiB, later {} MiB; read back {} MiB",
        used / MIB,
        first / MIB,
        last / MIB,
        read * 4096 / MIB
    ));
    // Each round reads all kept memory, so the host has read swapped pages back.
    assert!(read * 4096 >= TAKEN / 2, "the host read only {read} pages back from swap");
    assert!(last >= TAKEN / 2, "only {last} bytes are still swapped");
    iommu_is_content(&vmm, windows > 0);
    end(vmm);
    drop(group);
    drop(swap);
}

#[guest_test(
    needs(Swap),
    slow = "tests the host kernel's swapping more than Carom: no data may be lost while a drive works"
)]
fn guest_swapped_during_io_by_strict_mappings_loses_nothing() {
    swapped(0);
}

#[guest_test(
    needs(Swap),
    slow = "tests the host kernel's swapping more than Carom: no data may be lost while a drive works"
)]
fn guest_swapped_during_io_by_windows_loses_nothing() {
    swapped(64 * MIB);
}

/// Returns a job that fills memory with equal pages, and verifies I/O on the drive until the power button is pressed. Then the
/// job reads 32 MiB from the drive into these pages. The order of the 1 MiB blocks in memory may differ. Afterwards, these
/// pages must contain the drive's data.
fn fill_with_equal_pages_and_read_into_them() -> String {
    let verify = workload::fio_verify(8, 32);
    format!(
        r#"{WAIT_FOR_NVME}
irqs() {{ awk 'index($0, "ACPI:Ged") {{ for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n += $i }} END {{ print n + 0 }}' /proc/interrupts; }}
sums() {{
    i=0
    while [ $i -lt 32 ]; do
        dd if="$1" bs=1M skip=$i count=1 $2 2>/dev/null | md5sum
        i=$((i + 1))
    done | sort
}}
yes carom-- | head -c 1048576 >/block
i=0
while [ $i -lt {KEPT_MIB} ]; do cat /block; i=$((i + 1)); done >/kept
sum=$(md5sum </kept)
dd if=/dev/urandom of=/random bs=1M count=32 2>/dev/null
echo CAROM-READY
n=0
while [ "$(irqs)" = 0 ]; do
    {verify}
    n=$((n + 1))
    if [ "$(md5sum </kept)" = "$sum" ]; then echo "CAROM-KEPT $n"; else echo "CAROM-LOST $n"; fi
done
dd if=/random of=/dev/nvme0n1 bs=1M oflag=direct 2>/dev/null
# fio removes the file that it maps, so give fio a second link to the file.
ln /kept /buffers
fio --name=into --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --iodepth=32 --bs=1M --size=32M \
    --mem=mmapshared:/buffers --output-format=terse --terse-version=3 >/tmp/into || exit 91
echo "CAROM-READ-INTO $(awk -F';' '/^3;/ {{ print $5, $6 * 1024 }}' /tmp/into)"
sums /kept >/tmp/memory
sums /random >/tmp/drive
if cmp -s /tmp/memory /tmp/drive; then echo CAROM-SAME; else echo CAROM-OTHER; fi
while :; do sleep 1; done
"#
    )
}

#[guest_test(slow = "tests the host kernel's merging more than Carom: a drive may only write to its own pages")]
fn drive_writing_to_merged_pages_gets_its_own_pages() {
    let merging = Merging::on();
    let before = merging.pages_saved();
    let memory = json!({"size": 512 * MIB, "mergeable": true});
    let vmm = boot(&fill_with_equal_pages_and_read_into_them(), 0, json!({"memory": memory}), |_| {});
    let kept = KEPT_MIB * MIB / 4096;
    let merged = wait_until(&vmm, "pages are not merged", || {
        let pages = merging.pages_saved().saturating_sub(before);
        (pages >= kept * 9 / 10).then_some(pages)
    });
    all_is_right(&vmm, 2);
    merging.pause();
    let at_hand = merged_pages(vmm.pid());
    put(&vmm, "vm.power-button", &Value::Null);
    vmm.wait_for("CAROM-READ-INTO 0 33554432", 1, LIMIT).unwrap();
    let parted = at_hand.saturating_sub(merged_pages(vmm.pid()));
    vmm.wait_for("CAROM-SAME", 1, LIMIT).unwrap();
    tell(&format!("CAROM-MERGED of {kept} pages {merged}, later {at_hand}; {parted} split by writes of the drive"));
    assert!(parted * 4096 >= 24 * MIB, "the drive wrote to only {parted} merged pages");
    iommu_is_content(&vmm, false);
    end(vmm);
}

/// Checks that the host splits the guest's huge pages and makes huge pages again. `take` takes about `taken` bytes from the
/// guest and so splits huge pages. After `give`, the guest uses this memory again, and the host makes huge pages of it. Returns
/// the number of huge pages that the host made by collapsing small pages. This number excludes huge pages that the host
/// allocated directly, for ranges without any small page.
fn cut_and_made_again(
    vmm: &ApiVmm,
    collapsing: &Collapsing,
    taken: u64,
    take: impl FnOnce(),
    give: impl FnOnce(),
) -> u64 {
    let huge = || in_huge_pages(vmm.pid());
    let (before, cut_before) = (huge(), huge_pages_cut());
    assert!(before > taken, "{before}: see /sys/kernel/mm/transparent_hugepage/enabled");
    take();
    wait_until(vmm, "huge pages are not split", || Some(huge()).filter(|left| left + taken / 2 <= before));
    all_is_right(vmm, 2);
    let (left, cut) = (huge(), huge_pages_cut() - cut_before);
    // The kernel counts split huge pages, but not huge pages that it frees as a whole. So expect only half of the huge pages in
    // `taken` bytes.
    assert!(cut >= taken / (4 * MIB), "only {cut} huge pages were split");
    let made_before = collapsing.made();
    give();
    collapsing.go_on();
    let again = wait_until(vmm, "no huge pages are made", || Some(huge()).filter(|now| *now >= left + taken / 2));
    all_is_right(vmm, 2);
    let made = collapsing.made() - made_before;
    tell(&format!(
        "CAROM-HUGE {} MiB, {} MiB after {cut} huge pages were split, {} MiB and later {} MiB after {made} were made",
        before / MIB,
        left / MIB,
        again / MIB,
        huge() / MIB,
    ));
    iommu_is_content(vmm, true);
    made
}

/// Returns a job that uses memory once and frees it, so that a balloon takes memory that the host has allocated. After the
/// balloon has been inflated and deflated, the job uses the memory repeatedly. The job recognizes the balloon by MemTotal,
/// which excludes memory in the balloon.
fn lend_memory_and_work() -> String {
    let first = format!(
        "mkdir /lent
mount -t tmpfs -o size={USED_MIB}m lent /lent
fill() {{ dd if=/dev/zero of=/lent/fill bs=1M count={USED_MIB} 2>/dev/null; rm /lent/fill; }}
fill
total() {{ awk '/MemTotal/ {{ print $2 }}' /proc/meminfo; }}
all=$(total) lent="
    );
    let each_time = "now=$(total)
    [ $now -gt $((all - 150000)) ] || lent=1
    [ -z \"$lent\" ] || [ $now -lt $((all - 50000)) ] || fill";
    keep_memory_and_work(&first, each_time)
}

#[guest_test(slow = "tests the host kernel's huge pages more than Carom: no data may be lost while a drive works")]
fn huge_pages_split_by_a_balloon_return_during_window_io() {
    let collapsing = Collapsing::paused();
    let memory = json!({"size": 512 * MIB, "thp": true});
    let more = json!({"memory": memory, "balloon": {"size": 0}});
    let vmm = boot(&lend_memory_and_work(), 64 * MIB, more, |_| {});
    all_is_right(&vmm, 1);
    let taken = LENT_MIB * MIB;
    cut_and_made_again(&vmm, &collapsing, taken, || resize(&vmm, LENT_MIB), || resize(&vmm, 0));
    end(vmm);
}

#[guest_test(
    needs(Swap),
    slow = "tests the host kernel's swapping of huge pages more than Carom: no data may be lost while a drive works"
)]
fn huge_pages_split_by_swapping_return_during_window_io() {
    let collapsing = Collapsing::paused();
    let swap = Swap::on(SITE.swap.as_ref().unwrap()).unwrap();
    let group = MemoryGroup::new("carom-huge-pages").unwrap();
    // The job also writes the memory, because Linux 6.1 collapses pages only if at least one of them is writable
    // (`SCAN_PAGE_RO`).
    let job = keep_memory_and_work("", "dd if=/kept of=/kept bs=1M conv=notrunc 2>/dev/null");
    let memory = json!({"size": 512 * MIB, "thp": true});
    let vmm = boot(&job, 64 * MIB, json!({"memory": memory}), |vmm| group.add(vmm.pid()).unwrap());
    all_is_right(&vmm, 1);
    let used = group.without_a_file().unwrap();
    let take = || {
        group.limit(used - TAKEN).unwrap();
        let swapped = || Some(group.swapped().unwrap()).filter(|bytes| *bytes >= TAKEN * 3 / 4);
        wait_until(&vmm, "too little memory is swapped", swapped);
    };
    let give = || group.limit(2 * used).unwrap();
    let made = cut_and_made_again(&vmm, &collapsing, TAKEN, take, give);
    assert!(made > 0, "no huge page was made of small pages");
    end(vmm);
    drop(group);
    drop(swap);
}
