// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Makes the API calls that Kata Containers' runtime in Rust makes to Cloud Hypervisor. The driver uses the runtime's crate `ch-config` and
//! Cloud Hypervisor's `api_client`, and makes all calls on one connection:
//!
//! ```text
//! driver SOCKET DIRECTORY
//! ```
//!
//! `DIRECTORY` contains kernel, initrd and disk.img. Each line of the standard input is a step. For each step, the driver prints a line
//! with the step, `done` or `failed`, and the answer. `docs/kata.md` lists what is needed to build the driver.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, anyhow};
use ch_config::ch_api::{self, ApiSocket};
use ch_config::{
    BalloonConfig, DeviceConfig, DiskConfig, FsConfig, ImageType, MacAddr, NamedHypervisorConfig, NetConfig, VmConfig,
    VmResize, VsockConfig,
};
use kata_types::config::hypervisor::Hypervisor;

const MIB: u64 = 1 << 20;
const QUEUE_SIZE: u16 = 1024;

/// Returns the configuration of a sandbox without a shared file system.
fn config(directory: &str) -> Result<VmConfig> {
    let mut cfg = Hypervisor::default();
    cfg.boot_info.kernel = format!("{directory}/kernel");
    cfg.boot_info.initrd = format!("{directory}/initrd");
    cfg.cpu_info.default_vcpus = 1.0;
    cfg.cpu_info.default_maxvcpus = 2;
    cfg.memory_info.default_memory = 256;
    cfg.machine_info.entropy_source = "/dev/urandom".into();
    cfg.device_info.reclaim_guest_freed_memory = true;
    let (shared, hosts) = (Some(Vec::new()), Some(Vec::new()));
    let named = NamedHypervisorConfig {
        kernel_params: "panic=1 quiet no_timer_check noreplace-smp agent.log_vport=1025".into(),
        sandbox_path: directory.into(),
        vsock_socket_path: format!("{directory}/clh.sock"),
        cfg,
        shared_fs_devices: shared,
        host_devices: hosts,
        ..Default::default()
    };
    let mut config = VmConfig::try_from(named).map_err(|error| anyhow!("{error}"))?;
    // The driver uses a fixed size. The runtime uses the size of the host's RAM, which differs between hosts.
    config.memory.hotplug_size = Some(1024 * MIB);
    assert_eq!(config.balloon, Some(BalloonConfig { free_page_reporting: true, ..Default::default() }));
    Ok(config)
}

/// Opens a file of a new tap interface, as the runtime opens it.
fn tap() -> Result<File> {
    const TUNSETIFF: nix::libc::c_ulong = 0x4004_54ca;
    const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000 | 0x0100;
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
    let mut request = [0u8; 40];
    request[..6].copy_from_slice(b"kata%d");
    request[16..18].copy_from_slice(&FLAGS.to_ne_bytes());
    // SAFETY: the kernel reads and writes an `ifreq`, which has 40 bytes.
    if unsafe { nix::libc::ioctl(file.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) } < 0 {
        return Err(std::io::Error::last_os_error()).context("TUNSETIFF");
    }
    Ok(file)
}

fn net(fds: Vec<RawFd>) -> NetConfig {
    let mac = MacAddr { bytes: [2, 0, 0xca, 0xfe, 0, 1] };
    NetConfig { mac, num_queues: 2, queue_size: 256, fds: Some(fds), ..Default::default() }
}

fn disk(path: String) -> DiskConfig {
    DiskConfig {
        path: Some(path.into()),
        num_queues: 1,
        queue_size: QUEUE_SIZE,
        sparse: true,
        image_type: ImageType::Raw,
        ..Default::default()
    }
}

async fn step(socket: &ApiSocket, directory: &str, step: &str) -> Result<Option<String>> {
    let (verb, argument) = step.split_once('=').unwrap_or((step, ""));
    let number = || argument.parse::<u64>().with_context(|| step.to_string());
    match verb {
        "ping" => ch_api::cloud_hypervisor_vmm_ping(socket).await,
        "create" => ch_api::cloud_hypervisor_vm_create(socket, config(directory)?).await,
        "boot" => ch_api::cloud_hypervisor_vm_start(socket).await,
        "info" => {
            // The whole answer is parsed into the runtime's types.
            let info = ch_api::cloud_hypervisor_vm_info(socket).await?;
            Ok(Some(serde_json::to_string(&info)?))
        }
        "add-net" => {
            let fds = vec![tap()?.into_raw_fd()];
            let answer = ch_api::cloud_hypervisor_vm_netdev_add_with_fds(socket, net(fds.clone()), fds.clone()).await;
            for fd in fds {
                nix::unistd::close(fd)?;
            }
            answer
        }
        "add-disk" => ch_api::cloud_hypervisor_vm_blockdev_add(socket, disk(format!("{directory}/{argument}"))).await,
        "add-device" => {
            let device = DeviceConfig { path: argument.into(), ..Default::default() };
            ch_api::cloud_hypervisor_vm_device_add(socket, device).await
        }
        "add-vsock" => {
            let vsock = VsockConfig { cid: 4, socket: format!("{directory}/{argument}").into(), ..Default::default() };
            ch_api::cloud_hypervisor_vm_vsock_add(socket, vsock).await
        }
        "add-fs" => {
            let socket_path = format!("{directory}/{argument}").into();
            let fs = FsConfig {
                tag: "kataShared".into(),
                socket: socket_path,
                num_queues: 1,
                queue_size: QUEUE_SIZE,
                pci_segment: ch_config::convert::DEFAULT_NUM_PCI_SEGMENTS,
                ..Default::default()
            };
            ch_api::cloud_hypervisor_vm_fs_add(socket, fs).await
        }
        "resize-memory" => {
            // Like the runtime, the driver resizes the VM only if the VM's current size is smaller.
            let info = ch_api::cloud_hypervisor_vm_info(socket).await?;
            anyhow::ensure!(info.config.memory.size < number()? * MIB, "the VM already has this size");
            let resize = VmResize { desired_ram: Some(number()? * MIB), ..Default::default() };
            ch_api::cloud_hypervisor_vm_resize(socket, resize).await
        }
        "resize-vcpus" => {
            let resize = VmResize { desired_vcpus: Some(u32::try_from(number()?)?), ..Default::default() };
            ch_api::cloud_hypervisor_vm_resize(socket, resize).await
        }
        "remove-device" => {
            let device = ch_api::VmRemoveDeviceData { id: argument.into() };
            ch_api::cloud_hypervisor_vm_device_remove(socket, device).await
        }
        "pause" => ch_api::cloud_hypervisor_vm_pause(socket).await,
        "resume" => ch_api::cloud_hypervisor_vm_resume(socket).await,
        "snapshot" => {
            let to = ch_api::VmSnapshotConfig { destination_url: format!("file://{directory}/{argument}") };
            ch_api::cloud_hypervisor_vm_snapshot(socket, to).await
        }
        "restore" => {
            let from = ch_api::RestoreConfig { source_url: format!("file://{directory}/{argument}") };
            ch_api::cloud_hypervisor_vm_restore(socket, from).await
        }
        "stop" => ch_api::cloud_hypervisor_vm_stop(socket).await,
        "shutdown-vmm" => ch_api::cloud_hypervisor_vmm_shutdown(socket).await,
        _ => Err(anyhow!("no such step")),
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, directory] = &arguments[..] else {
        anyhow::bail!("usage: driver SOCKET DIRECTORY");
    };
    let connection = ApiSocket::new(Some(UnixStream::connect(socket).context("connect")?));
    for name in std::io::stdin().lines() {
        let name = name?;
        match step(&connection, directory, &name).await {
            Ok(answer) => println!("{name} done {}", answer.unwrap_or_default().replace('\n', " ")),
            Err(error) => println!("{name} failed {}", format!("{error:#}").replace('\n', " ")),
        }
    }
    Ok(())
}
