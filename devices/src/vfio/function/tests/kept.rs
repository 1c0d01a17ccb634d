// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that a crash report lists the last accesses to a host device.

use super::*;
use crate::crash::last_requests;

#[test]
fn crash_report_has_last_accesses_without_written_data() {
    let (msi, slots) = (FakeAllocator::default(), Arc::new(FakeSlots::default()));
    let device =
        VfioPciDevice::assemble("kept0", "0000:00:05.0", Box::new(nvme()), &msi, None, slots as Arc<_>).unwrap();
    device.write_config(regs::COMMAND, &DECODE);
    dword(&device, 0);
    device.write_bar(0, 0x1004, &[0xa5; 8]);
    device.read_bar(0, 0x2000, &mut [0; 4]);
    let expected = "last accesses to kept0, oldest first:\n\
                    1 write config offset=0x4 bytes=2\n\
                    2 read config offset=0x0 bytes=4\n\
                    3 write BAR 0 offset=0x1004 bytes=8\n\
                    4 read BAR 0 offset=0x2000 bytes=4\n";
    let text = last_requests();
    assert!(text.contains(expected), "{text}");
    drop(device);
    assert!(!last_requests().contains("kept0"));
}
