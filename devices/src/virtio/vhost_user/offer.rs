// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Capabilities of a server, and the negotiation after the front end has connected to the server.

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::connection::Connection;
use super::error::ServerError;
use super::model::{ConfigSource, Model, OnLoss};
use super::spec::{ACCESS_PLATFORM, PROTOCOL_FEATURES, RING_FEATURES, VERSION_1};

/// Number of memory regions that every server supports.
pub(super) const BASE_REGIONS: usize = 8;

/// Protocol features that a server needs behind the virtio-iommu: the server must request translations, confirm invalidations, and accept
/// window chunks as memory regions.
const TRANSLATIONS: [(Protocol, &str); 3] = [
    (Protocol::BACKEND_REQ, "VHOST_USER_PROTOCOL_F_BACKEND_REQ"),
    (Protocol::REPLY_ACK, "VHOST_USER_PROTOCOL_F_REPLY_ACK"),
    (Protocol::CONFIGURE_MEM_SLOTS, "VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS"),
];

/// Capabilities of a server.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// Virtio features, including `VHOST_USER_F_PROTOCOL_FEATURES`.
    features: u64,
    /// Negotiated protocol features.
    protocol: Protocol,
    /// Maximum number of memory regions.
    pub(super) regions: usize,
    /// Device configuration.
    pub(super) config: Vec<u8>,
}

impl Offer {
    /// Negotiates with the server of a device of `model`. `translated` is true if the device is behind the virtio-iommu.
    ///
    /// # Errors
    /// The server is gone, refuses a request, or lacks a capability that the device needs.
    pub(super) fn agree(connection: &mut Connection, model: &Model, translated: bool) -> Result<Self, ServerError> {
        let unfit = |text: String| Err(ServerError::Unfit(text));
        let features = connection.take()?;
        if features & VERSION_1 == 0 {
            return unfit("supports only legacy drivers (it lacks VIRTIO_F_VERSION_1): use another server".into());
        }
        if translated && features & ACCESS_PLATFORM == 0 {
            return unfit(
                "does not support iommu=on (it lacks VIRTIO_F_ACCESS_PLATFORM): set iommu=off, or use another server"
                    .into(),
            );
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
                return unfit(format!(
                    "does not support iommu=on (it lacks {name}): set iommu=off, or use another server"
                ));
            }
        }
        if protocol.contains(Protocol::MQ) {
            let (has, wanted) = (connection.queue_count()?, model.queues.len());
            if has < wanted as u64 {
                return unfit(format!(
                    "has {has} of the {wanted} queues that the device needs; reduce num_queues, or use a server with more queues"
                ));
            }
        } else if model.pairs.is_some() {
            return unfit("supports only one queue pair (it lacks VHOST_USER_PROTOCOL_F_MQ); reduce num_queues".into());
        }
        let regions = if protocol.contains(Protocol::CONFIGURE_MEM_SLOTS) {
            usize::try_from(connection.most_regions()?).unwrap_or(usize::MAX)
        } else {
            BASE_REGIONS
        };
        let config = match &model.config {
            ConfigSource::Own(bytes) => bytes.clone(),
            ConfigSource::Server { .. } if !protocol.contains(Protocol::CONFIG) => {
                return unfit(
                    "cannot send the device configuration (it lacks VHOST_USER_PROTOCOL_F_CONFIG): use another server"
                        .into(),
                );
            }
            ConfigSource::Server { .. } => read_config(connection, model)?,
        };
        Ok(Self { features, protocol, regions, config })
    }

    /// Returns the features to offer to the driver.
    pub(super) fn for_driver(&self, model: &Model) -> u64 {
        self.features & (model.server_features | RING_FEATURES) | model.own_features
    }

    /// Returns the features to send to the server for a driver that has accepted the features `accepted`.
    pub(super) fn for_server(&self, accepted: u64) -> u64 {
        self.features & accepted | self.features & PROTOCOL_FEATURES
    }

    /// True if the server offers all features in `accepted`, except the features in `own`. The front end and the transport implement the
    /// features in `own`.
    pub(super) fn can_go_on(&self, accepted: u64, own: u64) -> bool {
        accepted & !own & !self.features == 0
    }

    /// True if the server supports requests that enable and disable queues.
    pub(super) fn enables_queues(&self) -> bool {
        self.features & PROTOCOL_FEATURES != 0
    }

    /// True if this protocol feature was negotiated.
    pub(super) fn has(&self, feature: Protocol) -> bool {
        self.protocol.contains(feature)
    }
}

/// Reads the device configuration from the server. Overwrites the fields for which the front end has its own values.
pub(super) fn read_config(connection: &mut Connection, model: &Model) -> Result<Vec<u8>, ServerError> {
    let mut config = connection.config(model.config_len())?;
    if let ConfigSource::Server { over, .. } = &model.config {
        for (offset, bytes) in over {
            config[*offset..*offset + bytes.len()].copy_from_slice(bytes);
        }
    }
    Ok(config)
}
