// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network card (virtio 1.4, section 5.1). A server, such as DPDK or passt, moves the card's packets. The front end provides the card's
//! configuration and serves the card's control queue.

use super::model::{ConfigSource, Model, OnLoss};
use crate::virtio::net::spec::{
    CSUM, CTRL_VQ, DEVICE_TYPE, GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO4, GUEST_USO6, HOST_ECN,
    HOST_TSO4, HOST_TSO6, HOST_USO, MAC, MQ, MRG_RXBUF, MTU, PCI_CLASS,
};

/// Driver-visible properties of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedNet {
    /// MAC address.
    pub mac: [u8; 6],
    /// Maximum packet size in bytes, without the Ethernet header. `None` if the card does not report a limit to the driver.
    pub mtu: Option<u16>,
    /// Number of queue pairs, at least 1.
    pub pairs: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// True if the card may offer checksum offload in both directions. The card offers only offloads that the server supports.
    pub csum: bool,
    /// True if the card may offer TCP segmentation offload, if the server supports this offload. Requires `csum`.
    pub tso: bool,
    /// True if the card may offer UDP segmentation offload, if the server supports this offload. Requires `csum`.
    pub uso: bool,
}

impl Model {
    /// Returns the description of a network card.
    pub fn net(net: &ServedNet) -> Self {
        let when = |holds, features| if holds { features } else { 0 };
        let mut config = net.mac.to_vec();
        // The link status field is unused: `VIRTIO_NET_F_STATUS` is not offered.
        config.extend([0; 2]);
        config.extend(net.pairs.to_le_bytes());
        config.extend(net.mtu.unwrap_or(0).to_le_bytes());
        Self {
            device_type: DEVICE_TYPE,
            pci_class: PCI_CLASS,
            server_features: MRG_RXBUF
                | when(net.csum, CSUM | GUEST_CSUM)
                | when(net.csum && net.tso, GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | HOST_TSO4 | HOST_TSO6 | HOST_ECN)
                | when(net.csum && net.uso, GUEST_USO4 | GUEST_USO6 | HOST_USO),
            own_features: MAC | when(net.mtu.is_some(), MTU) | when(net.pairs > 1, CTRL_VQ | MQ),
            queues: vec![net.queue_size; 2 * usize::from(net.pairs)],
            pairs: (net.pairs > 1).then_some(net.pairs),
            config: ConfigSource::Own(config),
            on_loss: OnLoss::Lose,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: ServedNet =
        ServedNet { mac: [2, 0, 0, 0, 0, 1], mtu: None, pairs: 1, queue_size: 256, csum: true, tso: true, uso: true };

    #[test]
    fn configuration_is_address_pairs_and_mtu() {
        let model = Model::net(&ServedNet { mtu: Some(9000), pairs: 2, ..PLAIN });
        let ConfigSource::Own(config) = &model.config else { panic!("{:?}", model.config) };
        assert_eq!(config[..], [2, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0x28, 0x23]);
        assert_eq!((model.queues, model.pairs), (vec![256; 4], Some(2)));
        assert_eq!(model.own_features, 1 << 5 | 1 << 3 | 1 << 17 | 1 << 22);
    }

    #[test]
    fn one_pair_has_no_control_queue_and_offloads_can_be_turned_off() {
        let plain = Model::net(&PLAIN);
        assert_eq!((plain.pairs, plain.own_features), (None, 1 << 5));
        assert_ne!(plain.server_features & HOST_TSO4, 0);
        let bare = Model::net(&ServedNet { csum: false, ..PLAIN });
        assert_eq!(bare.server_features, MRG_RXBUF, "segmentation offloads need checksum offload");
        let no_tso = Model::net(&ServedNet { tso: false, ..PLAIN });
        assert_eq!(no_tso.server_features & (HOST_TSO4 | GUEST_TSO6 | HOST_USO | CSUM), HOST_USO | CSUM);
    }
}
