// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File system of the host (virtio 1.3, section 5.11), served by virtiofsd.

use super::model::{ConfigSource, Model, OnLoss};
use super::spec::fs::{DEVICE_TYPE, PCI_CLASS, TAG_BYTES};

impl Model {
    /// Returns the description of a file system that the guest mounts by its `tag`. Only the first 36 bytes of the tag are used. The file
    /// system has `requests` request queues and one high-priority queue, each of size `size`.
    pub fn fs(tag: &str, requests: u16, size: u16) -> Self {
        let mut config = tag.as_bytes().to_vec();
        config.resize(TAG_BYTES, 0);
        config.extend(u32::from(requests).to_le_bytes());
        Self {
            device_type: DEVICE_TYPE,
            pci_class: PCI_CLASS,
            server_features: 0,
            own_features: 0,
            queues: vec![size; usize::from(requests) + 1],
            pairs: None,
            config: ConfigSource::Own(config),
            on_loss: OnLoss::Fail,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_is_the_tag_and_the_number_of_queues() {
        let model = Model::fs("share", 2, 64);
        let ConfigSource::Own(config) = &model.config else { panic!("{:?}", model.config) };
        assert_eq!((config.len(), &config[..6], &config[36..]), (40, b"share\0".as_slice(), [2, 0, 0, 0].as_slice()));
        assert_eq!(model.queues, [64; 3]);
    }
}
