// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use carom_api::RestoreConfig;
use carom_api::cli::{ApiSocketOption, OptionName};
use carom_api::option_list::OptionList;
use carom_api::size::parse_size;
use carom_api::snapshot::DirectoryUrl;
use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::add_verb::AddVerb;

/// Controls a Carom VMM by its REST API.
#[derive(Debug, Parser)]
#[command(name = "carom-remote", version, max_term_width = 110)]
pub(crate) struct Cli {
    /// Socket of the VMM; path=FILE is accepted too
    #[arg(long, value_name = "FILE", env = "CAROM_API_SOCKET", value_parser = parse_socket)]
    pub(crate) api_socket: Option<PathBuf>,
    /// Command to execute
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Command to execute.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Check that the VMM answers, and show its version
    Ping,
    /// Create a VM: store its configuration, a JSON object
    Create {
        /// File with the configuration, or - for standard input
        #[arg(default_value = "-")]
        config: PathBuf,
    },
    /// Boot the VM
    Boot,
    /// Shut the VM down and forget its configuration
    Delete,
    /// Show the configuration and state of the VM
    Info,
    /// Show the counters of the VM's devices
    Counters,
    /// Stop the vCPUs
    Pause,
    /// Resume the vCPUs
    Resume,
    /// Save the VM, which must be paused
    Snapshot {
        /// New directory, or directory without a snapshot: file:///PATH
        destination_url: DirectoryUrl,
    },
    /// Restore a saved VM; it stays paused unless resume=on
    Restore {
        /// source_url=file:///PATH[,prefault=on|off][,resume=on|off]
        source: RestoreConfig,
    },
    /// Reset the guest
    Reboot,
    /// Stop the guest immediately, without asking it; the configuration stays
    Shutdown,
    /// Delete the VM and end the VMM
    ShutdownVmm,
    /// Press the power button
    PowerButton,
    /// Raise an NMI on every vCPU
    Nmi,
    /// Change vCPUs and RAM: immediately if the guest runs, otherwise for the next boot
    #[command(arg_required_else_help = true)]
    Resize {
        /// Number of vCPUs
        #[arg(long, value_name = "N")]
        cpus: Option<u32>,
        /// Bytes of RAM, with an optional K, M or G
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        memory: Option<u64>,
        /// Bytes that the guest returns through its balloon, with an optional K, M or G
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        balloon: Option<u64>,
    },
    /// Change the size of a disk and of its image while the guest runs
    ResizeDisk {
        /// ID of the disk
        #[arg(long, value_name = "ID")]
        disk: String,
        /// New size: bytes with an optional K, M or G
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: u64,
    },
    #[command(flatten)]
    Add(AddVerb),
    /// Remove a device; a running guest is asked to release the device first
    RemoveDevice {
        /// ID of the device
        id: String,
    },
    /// Show or change the bounce windows and the limit on other mapped memory
    IommuBounce {
        /// Maximum size of all bounce windows together: bytes with an optional K, M or G
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        budget: Option<u64>,
        /// Maximum size of DMA that bounces: bytes with an optional K or M, or auto to let the guest decide
        #[arg(long, value_name = "auto|SIZE", value_parser = parse_threshold)]
        threshold: Option<u32>,
        /// Maximum size of DMA that bounces if the device writes the memory: bytes with an optional K or M, or auto for the size of
        /// --threshold
        #[arg(long, value_name = "auto|SIZE", value_parser = parse_threshold)]
        threshold_write: Option<u32>,
        /// Maximum RAM that the guest may map in addition to the windows: bytes with an optional K, M or G, or none for no limit
        #[arg(long, value_name = "none|SIZE", value_parser = parse_max_mapped)]
        max_mapped: Option<u64>,
    },
    /// Show the metrics in Prometheus' text format
    Metrics,
    /// Show the OpenAPI document
    Openapi,
    /// Watch mapped memory, bounce windows, and the rates of requests to the virtio-iommu
    Top {
        /// Seconds between two updates
        #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
        interval: Duration,
        /// Print one update as plain text, and exit
        #[arg(long)]
        once: bool,
    },
    /// Print shell completions of carom and carom-remote
    Completions {
        /// Name of the shell
        shell: Shell,
    },
    /// Write the man pages of carom and carom-remote to a directory
    ManPages {
        /// Directory for the pages
        directory: PathBuf,
    },
}

/// Parses the socket option: `path=FILE` as for `carom`, or a plain path.
fn parse_socket(text: &str) -> Result<PathBuf, String> {
    if !text.starts_with("path=") {
        return if text.is_empty() { Err("the path is empty".into()) } else { Ok(text.into()) };
    }
    let list = OptionList::parse(ApiSocketOption::OPTION, text, &["path"]).map_err(|error| error.to_string())?;
    list.required("path").map(PathBuf::from).map_err(|error| error.to_string())
}

fn parse_threshold(text: &str) -> Result<u32, String> {
    if text == "auto" {
        return Ok(0);
    }
    u32::try_from(parse_size(text)?).map_err(|_| format!("'{text}' is above the maximum of 4294967295 bytes"))
}

fn parse_max_mapped(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_size(text) }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.parse().map_err(|_| format!("'{text}' is not a number of seconds: write a number such as 0.5"))?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!("{seconds} s is not between 0.1 s and 3600 s"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use serde_json::json;

    use super::*;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn values_are_checked() {
        assert_eq!(parse_socket("path=/s"), Ok("/s".into()));
        assert_eq!(parse_socket("a=b"), Ok("a=b".into()));
        assert_eq!(parse_socket("path=\"/a,b\""), Ok("/a,b".into()));
        assert!(parse_socket("").is_err() && parse_socket("path=").is_err());
        assert_eq!(parse_threshold("auto"), Ok(0));
        assert_eq!(parse_threshold("64K"), Ok(65536));
        assert!(parse_threshold("5G").is_err() && parse_threshold("x").is_err());
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        assert!(parse_interval("0").is_err() && parse_interval("NaN").is_err() && parse_interval("1e9").is_err());
    }

    #[test]
    fn verb_of_each_kind_has_its_operation_and_body() {
        for (verb, device, operation, body) in [
            (
                "add-device",
                "path=/d,iommu=on",
                "vm.add-device",
                json!({"path": "/d", "iommu": true, "pci_segment": 0, "id": null}),
            ),
            (
                "add-user-device",
                "socket=/s,id=x",
                "vm.add-user-device",
                json!({"socket": "/s", "iommu": false, "pci_segment": 0, "id": "x"}),
            ),
            (
                "add-disk",
                "path=/i,readonly=on",
                "vm.add-disk",
                json!({"path": "/i", "vhost_user": false, "vhost_socket": null, "readonly": true, "direct": false, "iommu": false, "pci_segment": 0, "num_queues": 1, "queue_size": 128, "queue_affinity": [],
                    "serial": null, "image_type": "Unknown", "backing_files": false, "sparse": true, "rate_limiter_config": null, "rate_limit_group": null, "lock_granularity": "ByteRange", "id": null}),
            ),
            (
                "add-net",
                "tap=t,mac=02:00:00:00:00:01,offload_ufo=off",
                "vm.add-net",
                json!({"tap": "t", "ip": null, "mask": null, "mac": "02:00:00:00:00:01", "host_mac": null, "mtu": null, "iommu": false, "pci_segment": 0, "num_queues": 2,
                    "queue_size": 256, "offload_tso": true, "offload_ufo": false, "offload_csum": true, "rate_limiter_config": null, "id": null, "vhost_user": false, "vhost_socket": null, "vhost_mode": "Client"}),
            ),
            (
                "add-fs",
                "tag=t,socket=/s,queue_size=512",
                "vm.add-fs",
                json!({"tag": "t", "socket": "/s", "num_queues": 1, "queue_size": 512, "iommu": false, "pci_segment": 0, "id": null}),
            ),
            (
                "add-vsock",
                "cid=3,socket=/s",
                "vm.add-vsock",
                json!({"cid": 3, "socket": "/s", "iommu": false, "pci_segment": 0, "id": null}),
            ),
        ] {
            let cli = Cli::try_parse_from(["carom-remote", verb, device]).unwrap();
            let Verb::Add(add) = cli.verb else { panic!("{verb}") };
            assert_eq!((add.operation, json!(add.device)), (operation, body));
        }
        assert!(Cli::try_parse_from(["carom-remote", "add-device", "socket=/s"]).is_err());
        assert!(Cli::try_parse_from(["carom-remote", "add-device"]).is_err());
        let refused = Cli::try_parse_from(["carom-remote", "add-net", "fd=3"]).unwrap_err().to_string();
        assert!(refused.contains("--net fd: works only on the command line of carom"), "{refused}");
    }
}
