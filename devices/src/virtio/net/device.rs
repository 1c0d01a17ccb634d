// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::carrier::Offloads;
use super::control::{CONTROL_QUEUE_SIZE, Control, control_queue};
use super::counters::NetCounters;
use super::link::Link;
use super::pair::Pair;
use super::queue_worker::QueueWorker;
use super::spec::{
    CONFIG_BYTES, CSUM, CTRL_VQ, DEVICE_TYPE, GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO4, GUEST_USO6,
    HOST_ECN, HOST_TSO4, HOST_TSO6, HOST_USO, MAC, MQ, MRG_RXBUF, MTU, PCI_CLASS,
};
use super::state::{NetState, STATE};
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::throttle::Throttle;
use crate::virtio::{Driver, QueueState, VirtioDevice};
use crate::worker::Worker;

/// Role of the threads that serve a pair of queues each: read and write the file of the host's interface.
pub const ROLE: ThreadRole = ThreadRole { name: "net", calls: &[] };
/// Role of the thread that serves the control queue: sets the host's interface up.
pub const CONTROL_ROLE: ThreadRole = ThreadRole { name: "net_control", calls: &[calls::TAP] };

/// What a driver is told of the host's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetTraits {
    /// Address of the device.
    pub mac: [u8; 6],
    /// Most bytes of a packet, without the Ethernet header.
    pub mtu: u16,
    /// Pairs of queues, 1 at least.
    pub pairs: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// Whether checksums may be left to the other side.
    pub csum: bool,
    /// Whether segments of TCP may come and go as one packet. Needs checksums.
    pub tso: bool,
    /// Whether segments of UDP may. Needs checksums.
    pub uso: bool,
    /// Whether a large packet may come in several small buffers. A driver that has segments come as one packet otherwise
    /// has room for the largest one at each place of the queue (section 5.1.6.3.1).
    pub merges: bool,
}

impl NetTraits {
    fn features(&self) -> u64 {
        let when = |holds, features| if holds { features } else { 0 };
        1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | MAC
            | MTU
            | when(self.merges, MRG_RXBUF)
            | when(self.pairs > 1, CTRL_VQ | MQ)
            | when(self.csum, CSUM | GUEST_CSUM)
            | when(self.csum && self.tso, GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | HOST_TSO4 | HOST_TSO6 | HOST_ECN)
            | when(self.csum && self.uso, GUEST_USO4 | GUEST_USO6 | HOST_USO)
    }

    /// The configuration (virtio 1.4, section 5.1.4): address, status, pairs of queues, MTU.
    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[..6].copy_from_slice(&self.mac);
        config[8..10].copy_from_slice(&self.pairs.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        config
    }

    /// Sizes of pairs of queues, and of the control queue where there are several.
    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![self.queue_size; usize::from(self.pairs) * 2];
        sizes.extend((self.pairs > 1).then_some(CONTROL_QUEUE_SIZE));
        sizes
    }
}

/// The doorbell of a queue: a pair has one.
fn doorbell_of(queue: usize) -> usize {
    queue / 2
}

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    /// By pair of queues. The control queue's follow: where it has the number behind all pairs, and where it has another.
    workers: Vec<Option<QueueWorker>>,
    paused: bool,
}

impl Active {
    /// True if this is the control queue of a device of `pairs` pairs.
    fn is_control(&self, queue: u16, pairs: u16) -> bool {
        // A number behind all pairs can be nothing else, whatever the driver accepted.
        queue == 2 * pairs || self.driver.as_ref().is_some_and(|driver| queue == control_queue(driver.features, pairs))
    }

    /// The place of a queue's worker. No two queues share one but those of a pair.
    fn place(&self, queue: u16, pairs: u16) -> usize {
        let is_moved = queue != 2 * pairs && self.is_control(queue, pairs);
        if is_moved { usize::from(pairs) + 1 } else { usize::from(queue / 2) }
    }
}

/// A network device.
pub struct VirtioNet {
    link: Arc<Link>,
    traits: NetTraits,
    features: u64,
    config: [u8; CONFIG_BYTES],
    queue_sizes: Vec<u16>,
    /// By pair of queues, and the control queue's behind all of them.
    doorbells: Vec<EventFd>,
    /// Pairs of queues that the driver uses.
    pairs: Arc<AtomicU16>,
    active: Mutex<Active>,
    throttle: Throttle,
}

impl VirtioNet {
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(link: Link, traits: NetTraits) -> io::Result<Self> {
        let queue_sizes = traits.queue_sizes();
        let doorbells = doorbell_of(queue_sizes.len().saturating_sub(1)) + 1;
        let active =
            Active { workers: (0..usize::from(traits.pairs) + 2).map(|_| None).collect(), ..Active::default() };
        Ok(Self {
            link: Arc::new(link),
            traits,
            features: traits.features(),
            config: traits.config(),
            doorbells: (0..doorbells).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<_>>()?,
            queue_sizes,
            pairs: Arc::new(AtomicU16::new(1)),
            active: Mutex::new(active),
            throttle: Throttle::default(),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> NetCounters {
        self.link.counts.read()
    }

    /// Has the host use so many pairs of queues, and give packets as the driver takes them.
    fn set_up(&self, features: u64, pairs: u16) {
        let carrier = &self.link.carrier;
        let done = carrier.set_offloads(Offloads::of(features)).and_then(|()| carrier.set_pairs(pairs));
        if let Err(error) = done {
            // Packets that the driver cannot take are worse than none, but nobody could be told.
            self.link.complain(&self.throttle, "setting the host's interface up", &error);
        }
        self.pairs.store(pairs, Ordering::Release);
    }
}

impl VirtioDevice for VirtioNet {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_len(&self) -> usize {
        CONFIG_BYTES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        for (value, byte) in data.iter_mut().zip(self.config.iter().skip(offset)) {
            *value = *byte;
        }
    }

    fn write_config(&self, _: usize, _: &[u8]) {}

    fn activate(&self, driver: Driver) {
        self.set_up(driver.features, 1);
        lock(&self.active).driver = Some(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone() else { return Ok(()) };
        let Some(doorbell) = self.doorbell(index) else { return Ok(()) };
        let (place, is_control) = (active.place(index, self.traits.pairs), active.is_control(index, self.traits.pairs));
        if let Some(QueueWorker::Pair(worker)) = &active.workers[place] {
            // The other queue of the pair has started it.
            worker.pause();
            worker.with_task(|pair| pair.put(index, queue));
            if !active.paused {
                worker.resume();
            }
            return Ok(());
        }
        let (bell, paused, link) = (doorbell.try_clone()?, active.paused, self.link.clone());
        let worker = if is_control {
            let thread = format!("{}_ctrl", self.link.id);
            let task = Control::new(index, queue, driver, link, self.traits.pairs, self.pairs.clone());
            QueueWorker::Control(Worker::spawn(thread, CONTROL_ROLE, bell, paused, task)?)
        } else {
            let thread = format!("{}_qp{place}", self.link.id);
            let mut pair = Pair::new(driver, link);
            pair.put(index, queue);
            QueueWorker::Pair(Worker::spawn(thread, ROLE, bell, paused, pair)?)
        };
        active.workers[place] = Some(worker);
        Ok(())
    }

    /// With the last queue of a pair its thread ends.
    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        let mut active = lock(&self.active);
        let (paused, place) = (active.paused, active.place(index, self.traits.pairs));
        let place = active.workers.get_mut(place)?;
        let worker = place.as_ref()?;
        worker.pause();
        let (state, was_last) = worker.take(index);
        if was_last {
            *place = None;
        } else if !paused {
            worker.resume();
        }
        state
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        active.workers.get(active.place(index, self.traits.pairs))?.as_ref()?.state(index)
    }

    /// Queues of a pair have one, as they have one thread.
    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        self.doorbells.get(doorbell_of(queue.into()))
    }

    fn reset(&self) {
        let had = lock(&self.active).driver.take();
        if had.is_some() {
            self.set_up(0, 1);
        }
    }

    fn pause(&self) {
        let mut active = lock(&self.active);
        active.paused = true;
        active.workers.iter().flatten().for_each(QueueWorker::pause);
    }

    fn resume(&self) {
        let mut active = lock(&self.active);
        active.paused = false;
        active.workers.iter().flatten().for_each(QueueWorker::resume);
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let pairs = self.pairs.load(Ordering::Acquire);
        DeviceState::new(STATE.0, STATE.1, &NetState { mac: self.traits.mac, mtu: self.traits.mtu, pairs })
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let NetState { mac, mtu, pairs } = state.payload(STATE.0, STATE.1)?;
        let rule = |field, rule| Err(StateError::rule(field, rule));
        if mac != self.traits.mac {
            return rule("mac", "is not that of the configuration".to_string());
        }
        if mtu != self.traits.mtu {
            return rule("mtu", format!("is {mtu}, but {} of the interface that there is now", self.traits.mtu));
        }
        if !(1..=self.traits.pairs).contains(&pairs) {
            return rule("pairs", format!("{pairs} is not 1 to {}", self.traits.pairs));
        }
        let mut active = lock(&self.active);
        active.paused = true;
        if let Some(driver) = &active.driver {
            self.set_up(driver.features, pairs);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mergeable_buffers_are_offered_only_if_the_traits_allow() {
        let traits = |merges| NetTraits {
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            pairs: 1,
            queue_size: 256,
            csum: true,
            tso: true,
            uso: true,
            merges,
        };
        assert_eq!(traits(false).features() & MRG_RXBUF, 0);
        assert_eq!(traits(true).features(), traits(false).features() | MRG_RXBUF);
    }
}
