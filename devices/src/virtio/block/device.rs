// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The disk device and its implementation of `VirtioDevice`.

use std::io;
use std::sync::Arc;

use super::config_space;
use super::counters::BlockCounters;
use super::disk::Disk;
use super::image::error::ResizeError;
use super::queue::requests::Requests;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS};
use super::state::{BlockState, STATE};
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::virtio::device::read_bytes;
use crate::virtio::queue_worker::{QueueWorker, Thread};
use crate::virtio::{DeviceProperties, DeviceQueues, VirtioDevice};

/// Role of the threads that read and write the image. Each queue has such a thread.
pub const ROLE: ThreadRole =
    ThreadRole { name: "block", calls: &[calls::AT_PLACES, calls::POLICY, calls::URING, calls::WAITING] };

/// A disk device.
pub struct VirtioBlock {
    disk: Arc<Disk>,
    features: u64,
    /// Configuration space, except the disk's capacity.
    config: [u8; CONFIG_BYTES],
    queue_sizes: Vec<u16>,
    queues: QueueWorker<Requests>,
}

impl VirtioBlock {
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(disk: Disk, queues: u16, queue_size: u16) -> io::Result<Self> {
        let disk = Arc::new(disk);
        let of_threads = disk.clone();
        let make = move |driver, index, queue, doorbell: &_| {
            let requests = Requests::new(index, queue, driver, of_threads.clone(), doorbell)?;
            // The thread has the same name as in Cloud Hypervisor: device name, then queue number.
            let name = format!("{}_q{index}", of_threads.id);
            Ok((Thread { name, role: ROLE, cpus: of_threads.affinity.get(&index).copied() }, requests))
        };
        Ok(Self {
            features: config_space::features(&disk.image, queues),
            config: config_space::bytes(&disk.image, queues, queue_size),
            queue_sizes: vec![queue_size; queues.into()],
            queues: QueueWorker::several(queues.into(), 1, |_, _| false, make)?,
            disk,
        })
    }

    /// Returns the counters.
    pub fn counters(&self) -> BlockCounters {
        self.disk.counts.read()
    }

    /// Changes the disk's size and notifies the driver. The device first completes the requests that are under way. New requests wait until
    /// the size is changed.
    ///
    /// # Errors
    /// The size stays unchanged. The [`ResizeError`] states the reason.
    pub fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        self.queues.while_paused(|| self.disk.image.resize(bytes))?;
        if let Some(driver) = self.queues.driver() {
            driver.interrupt.config_changed(true);
        }
        Ok(())
    }
}

impl VirtioDevice for VirtioBlock {
    fn properties(&self) -> DeviceProperties<'_> {
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, self.features, &self.queue_sizes, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = self.config;
        let capacity = config_space::capacity(&self.disk.image);
        config[..capacity.len()].copy_from_slice(&capacity);
        read_bytes(&config, offset, data);
    }

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let image = &self.disk.image;
        let settled = image.settle();
        settled.map_err(|source| StateError::Host {
            what: "cannot write the image's tables to the image file".into(),
            source,
        })?;
        DeviceState::new(STATE.0, STATE.1, &BlockState { sectors: image.sectors(), block_size: image.block() })
    }

    /// Restores the disk. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let BlockState { sectors, block_size } = state.payload(STATE.0, STATE.1)?;
        let image = &self.disk.image;
        for (field, saved, now) in
            [("sectors", sectors, image.sectors()), ("block_size", block_size.into(), image.block().into())]
        {
            if saved != now {
                let rule = format!(
                    "the saved state has {saved}, but the image now has {now}; restore with the image that was saved"
                );
                return Err(StateError::rule(field, rule));
            }
        }
        self.queues.restore_paused();
        Ok(())
    }
}
