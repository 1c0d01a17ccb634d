// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::carrier::Offloads;
use super::control::CONTROL_QUEUE_SIZE;
use super::counters::NetCounters;
use super::link::Link;
use super::spec::{
    CONFIG_BYTES, CSUM, CTRL_VQ, DEVICE_TYPE, GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO4, GUEST_USO6,
    HOST_ECN, HOST_TSO4, HOST_TSO6, HOST_USO, MAC, MQ, MRG_RXBUF, MTU, PCI_CLASS,
};
use super::state::{NetState, STATE};
use super::threads::{Work, threads};
use crate::state::{DeviceState, StateError};
use crate::throttle::Throttle;
use crate::virtio::device::read_bytes;
use crate::virtio::queue_worker::QueueWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, Driver, VirtioDevice};

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

/// A network device.
pub struct VirtioNet {
    link: Arc<Link>,
    traits: NetTraits,
    features: u64,
    config: [u8; CONFIG_BYTES],
    queue_sizes: Vec<u16>,
    /// Pairs of queues that the driver uses.
    pairs: Arc<AtomicU16>,
    queues: QueueWorker<Work>,
    throttle: Throttle,
}

impl VirtioNet {
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(link: Link, traits: NetTraits) -> io::Result<Self> {
        let (link, queue_sizes, pairs) = (Arc::new(link), traits.queue_sizes(), Arc::new(AtomicU16::new(1)));
        let queues = threads(link.clone(), queue_sizes.len(), traits.pairs, pairs.clone())?;
        Ok(Self {
            link,
            traits,
            features: traits.features(),
            config: traits.config(),
            queues,
            queue_sizes,
            pairs,
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
    fn properties(&self) -> DeviceProperties<'_> {
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, self.features, &self.queue_sizes, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.config, offset, data);
    }

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn activate(&self, driver: Driver) {
        self.set_up(driver.features, 1);
        self.queues.activate(driver);
    }

    fn reset(&self) {
        let had_driver = self.queues.driver().is_some();
        self.queues.reset();
        if had_driver {
            self.set_up(0, 1);
        }
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
        self.queues.restore_paused();
        if let Some(driver) = self.queues.driver() {
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
