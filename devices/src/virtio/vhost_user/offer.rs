// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a server has, and what is agreed on with it when it is connected.

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::connection::Connection;
use super::error::ServerError;
use super::model::{ConfigSource, Model, OnLoss};
use super::spec::{ACCESS_PLATFORM, PROTOCOL_FEATURES, RING_FEATURES, VERSION_1};

/// Regions of RAM that any server takes.
pub(super) const BASE_REGIONS: usize = 8;

/// What a server needs to translate addresses: it asks for translations, says when it has forgotten one, and takes chunks of windows.
const TRANSLATIONS: [(Protocol, &str); 3] = [
    (Protocol::BACKEND_REQ, "VHOST_USER_PROTOCOL_F_BACKEND_REQ"),
    (Protocol::REPLY_ACK, "VHOST_USER_PROTOCOL_F_REPLY_ACK"),
    (Protocol::CONFIGURE_MEM_SLOTS, "VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS"),
];

/// What a server has.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// Virtio features, those between front end and server among them.
    features: u64,
    protocol: Protocol,
    /// Most regions of RAM.
    pub(super) regions: usize,
    /// The device configuration.
    pub(super) config: Vec<u8>,
}

impl Offer {
    /// Agrees with the server of a device of `model`, which is behind the virtio-iommu if `translated`.
    ///
    /// # Errors
    /// The server is gone, refuses, or lacks what the device needs.
    pub(super) fn agree(connection: &mut Connection, model: &Model, translated: bool) -> Result<Self, ServerError> {
        let unfit = |text: String| Err(ServerError::Unfit(text));
        let features = connection.take()?;
        if features & VERSION_1 == 0 {
            return unfit("serves legacy drivers only (VIRTIO_F_VERSION_1)".into());
        }
        if translated && features & ACCESS_PLATFORM == 0 {
            return unfit("translates no addresses, as iommu=on needs it (VIRTIO_F_ACCESS_PLATFORM)".into());
        }
        let mut protocol = Protocol::empty();
        if features & PROTOCOL_FEATURES != 0 {
            let mut wanted =
                Protocol::MQ | Protocol::REPLY_ACK | Protocol::RESET_DEVICE | Protocol::CONFIGURE_MEM_SLOTS;
            if model.on_loss != OnLoss::Lose {
                wanted |= Protocol::INFLIGHT_SHMFD;
            }
            if model.asks_for_config() {
                wanted |= Protocol::CONFIG | Protocol::BACKEND_REQ;
            }
            if translated {
                wanted |= Protocol::BACKEND_REQ;
            }
            protocol = connection.agree(wanted)?;
        }
        for (needed, name) in TRANSLATIONS {
            if translated && !protocol.contains(needed) {
                return unfit(format!("translates addresses without what iommu=on needs for it ({name})"));
            }
        }
        if protocol.contains(Protocol::MQ) {
            let (has, wanted) = (connection.queue_count()?, model.queues.len());
            if has < wanted as u64 {
                return unfit(format!("has {has} queues, and the device {wanted}"));
            }
        } else if model.pairs.is_some() {
            return unfit("has one pair of queues only (VHOST_USER_PROTOCOL_F_MQ)".into());
        }
        let regions = if protocol.contains(Protocol::CONFIGURE_MEM_SLOTS) {
            usize::try_from(connection.most_regions()?).unwrap_or(usize::MAX)
        } else {
            BASE_REGIONS
        };
        let config = match &model.config {
            ConfigSource::Own(bytes) => bytes.clone(),
            ConfigSource::Server { .. } if !protocol.contains(Protocol::CONFIG) => {
                return unfit("does not tell the device's configuration (VHOST_USER_PROTOCOL_F_CONFIG)".into());
            }
            ConfigSource::Server { .. } => read_config(connection, model)?,
        };
        Ok(Self { features, protocol, regions, config })
    }

    /// What the driver is offered of it.
    pub(super) fn for_driver(&self, model: &Model) -> u64 {
        self.features & (model.server_features | RING_FEATURES) | model.own_features
    }

    /// What of the features that a driver has accepted is for the server.
    pub(super) fn for_server(&self, accepted: u64) -> u64 {
        self.features & accepted | self.features & PROTOCOL_FEATURES
    }

    /// Whether it has what `accepted` needs beside `own`, the front end's features.
    pub(super) fn can_go_on(&self, accepted: u64, own: u64) -> bool {
        accepted & !own & !self.features == 0
    }

    /// Whether queues are turned on and off.
    pub(super) fn enables_queues(&self) -> bool {
        self.features & PROTOCOL_FEATURES != 0
    }

    /// Whether this was agreed on.
    pub(super) fn has(&self, feature: Protocol) -> bool {
        self.protocol.contains(feature)
    }
}

/// The device configuration of a server, as the driver is to see it.
pub(super) fn read_config(connection: &mut Connection, model: &Model) -> Result<Vec<u8>, ServerError> {
    let mut config = connection.config(model.config_len())?;
    if let ConfigSource::Server { over, .. } = &model.config {
        for (offset, bytes) in over {
            config[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
    }
    Ok(config)
}
