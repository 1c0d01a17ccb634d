// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The network device and its implementation of `VirtioDevice`.

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

/// Properties of the device that the driver sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetTraits {
    /// MAC address of the device.
    pub mac: [u8; 6],
    /// Maximum size of a packet in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Number of pairs of queues, at least 1.
    pub pairs: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// True if guest and host may send each other packets whose checksum is not computed yet.
    pub csum: bool,
    /// True if guest and host may send each other large TCP packets that are not segmented yet. Requires `csum`.
    pub tso: bool,
    /// True if guest and host may send each other large UDP packets that are not segmented yet. Requires `csum`.
    pub uso: bool,
    /// True if a large packet may be spread over several small receive buffers. Without this feature, a driver that accepts large packets
    /// must make each receive buffer large enough for the largest packet (section 5.1.6.3.1).
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

    /// Returns the configuration (virtio 1.4, section 5.1.4): MAC address, status, number of pairs, MTU.
    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        config[..6].copy_from_slice(&self.mac);
        config[8..10].copy_from_slice(&self.pairs.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        config
    }

    /// Returns the sizes of all queues. A device with several pairs also has a control queue as its last queue.
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
    /// Number of pairs of queues that the driver uses.
    pairs: Arc<AtomicU16>,
    queues: QueueWorker<Work>,
    throttle: Throttle,
}

impl VirtioNet {
    /// # Errors
    /// The process has no free file descriptor.
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

    /// Returns the counters.
    pub fn counters(&self) -> NetCounters {
        self.link.counts.read()
    }

    /// Configures the host interface with the offloads that the driver accepted in `features`, and with the number of queue pairs in use.
    fn set_up(&self, features: u64, pairs: u16) {
        let carrier = &self.link.carrier;
        let done = carrier.set_offloads(Offloads::of(features)).and_then(|()| carrier.set_pairs(pairs));
        if let Err(error) = done {
            // The guest may now receive packets that it cannot process. The device cannot report this failure to the driver, so the failure
            // is only logged.
            self.link.complain(&self.throttle, "cannot set offloads and queues of the host interface, so the guest may get packets that it cannot process", &error);
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

    /// Restores the device. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let NetState { mac, mtu, pairs } = state.payload(STATE.0, STATE.1)?;
        let rule = |field, rule| Err(StateError::rule(field, rule));
        if mac != self.traits.mac {
            let differs = "the saved MAC address differs from the configured MAC address: restore with the configuration that was saved";
            return rule("mac", differs.to_string());
        }
        if mtu != self.traits.mtu {
            return rule(
                "mtu",
                format!(
                    "the saved MTU is {mtu}, but the host interface has MTU {}; set the interface's MTU to {mtu}",
                    self.traits.mtu
                ),
            );
        }
        if !(1..=self.traits.pairs).contains(&pairs) {
            return rule(
                "pairs",
                format!(
                    "the saved number of queue pairs is {pairs}, but it must be between 1 and {}: restore with the configuration that was saved",
                    self.traits.pairs
                ),
            );
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
