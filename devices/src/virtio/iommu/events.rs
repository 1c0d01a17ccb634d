// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Event queue: delivers faults to the driver (virtio 1.3, section 5.13.6.9).

use iommu_bounce::Engine;
use iommu_bounce::spec::fault;
use virtio_queue::{Queue, QueueOwnedT, QueueT};

use crate::dma::NearMemory;
use crate::ram::Ram;
use crate::virtio::DeviceError;
use crate::virtio::chain::{broken, read_request, ring_error};
use crate::virtio::notification::{ask_for_notifications, wants_interrupt};

/// Index of the event queue.
pub(super) const EVENT_QUEUE: u16 = 1;

/// Delivers pending faults to the driver, while the event queue has buffers for the faults. Returns true if the driver wants an interrupt.
///
/// If a buffer is too small for the report of a fault, the device returns the buffer empty, and uses the next buffer.
pub(super) fn deliver(queue: &mut Queue, memory: &Ram, engine: &mut Engine) -> Result<bool, DeviceError> {
    let memory = &NearMemory::new(memory);
    let (broken, ring_error) = (broken(EVENT_QUEUE), ring_error(EVENT_QUEUE));
    ask_for_notifications(queue, memory).map_err(&ring_error)?;
    let size = queue.size();
    let mut left = size;
    while left != 0 && engine.has_faults() {
        let Some(chain) = queue.iter(memory).map_err(&ring_error)?.next() else { break };
        let buffer = read_request(chain, memory, size, &mut []).map_err(&broken)?;
        let head = buffer.head;
        let report = if buffer.writable < fault::SIZE { None } else { engine.take_fault() };
        let used = report.map_or(0, |_| u32::try_from(fault::SIZE).expect("a report is short"));
        if let Some(report) = report {
            buffer
                .write_reply(memory, &report.encode())
                .inspect_err(|_| engine.count_lost_faults(1))
                .map_err(&broken)?;
        }
        queue.add_used(memory, head, used).map_err(&ring_error)?;
        left -= 1;
    }
    if left == size { Ok(false) } else { wants_interrupt(queue, memory).map_err(&ring_error) }
}
