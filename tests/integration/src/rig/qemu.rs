// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! QEMU's arguments for the machine and its devices.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use carom_tools::rig::Boot;

use super::job::{BAD_PLACE, FIRST_MORE_SLOT, NULL_SLOT};
use super::options::Options;

/// Files of a run, in one directory.
pub(super) struct Files<'a>(pub(super) &'a Path);

impl Files<'_> {
    pub(super) fn console(&self) -> PathBuf {
        self.0.join("console")
    }
    /// FIFO for the command's stdout.
    pub(super) fn out(&self) -> PathBuf {
        self.0.join("out")
    }
    /// FIFO for the command's stderr.
    pub(super) fn err(&self) -> PathBuf {
        self.0.join("err")
    }
    /// Status file that the machine writes, see `scripts/lib/rig-init`.
    pub(super) fn control(&self) -> PathBuf {
        self.0.join("ctl")
    }
    /// Initramfs with the job.
    pub(super) fn initramfs(&self) -> PathBuf {
        self.0.join("initramfs")
    }
    /// QEMU's own messages.
    pub(super) fn log(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
    /// Socket of the command's terminal.
    pub(super) fn terminal(&self) -> PathBuf {
        self.0.join("tty")
    }
    pub(super) fn drives(&self) -> [PathBuf; 2] {
        ["nvme1.img", "nvme2.img"].map(|name| self.0.join(name))
    }
    /// Images of the drives of `--more-nvme`.
    pub(super) fn more_drives(&self, count: u8) -> impl Iterator<Item = PathBuf> {
        (0..count).map(|number| self.0.join(format!("nvme-more{number}.img")))
    }
    pub(super) fn stick(&self) -> PathBuf {
        self.0.join("usb.img")
    }
    pub(super) fn sata(&self) -> PathBuf {
        self.0.join("sata.img")
    }
    /// Image of the swap device.
    pub(super) fn swap(&self) -> PathBuf {
        self.0.join("swap.img")
    }
}

/// Returns the arguments for the accelerator. With `icount`, the machine's clock advances by 2 ns per instruction. When all
/// CPUs are idle, the clock jumps to the next event.
pub(super) fn accelerator(name: &str, icount: bool) -> Vec<&'static str> {
    if name == "kvm" {
        return vec!["-accel", "kvm", "-cpu", "host"];
    }
    // -fsrm,-erms: with these features, the kernel would copy memory by `rep movsb`. QEMU emulates this instruction byte by
    // byte, so copying would be ten times as slow as on hardware.
    let mut all = vec!["-cpu", "max,+svm,+npt,-fsrm,-erms", "-accel"];
    if icount {
        all.extend(["tcg,thread=single,tb-size=1024", "-icount", "shift=1,sleep=off"]);
    } else {
        all.push("tcg,thread=multi,tb-size=1024");
    }
    all
}

/// Returns the arguments for a plug-in that writes to `out`.
///
/// # Errors
/// Fails if a path is not UTF-8.
pub(super) fn plugin(file: &Path, out: &Path) -> Result<Vec<String>> {
    Ok(vec!["-plugin".into(), format!("file={},out={}", value(file)?, value(out)?)])
}

/// True if the emulator has igb network cards, like QEMU 8.0 and later. `emulator` contains its program and first arguments.
///
/// # Errors
/// Fails if the emulator does not start.
pub(super) fn has_igb(emulator: &[OsString]) -> Result<bool> {
    let [program, arguments @ ..] = emulator else { return Ok(false) };
    let output = Command::new(program).args(arguments).args(["-device", "igb,help"]).output();
    Ok(output.with_context(|| format!("cannot start {}", program.display()))?.status.success())
}

/// Returns the arguments for the machine, its devices, its kernel and its shared directories. With `igb`, the machine has an
/// igb card, which older emulators lack.
///
/// # Errors
/// Fails if a path is not UTF-8.
pub(super) fn arguments(
    files: &Files,
    boot: &Boot,
    options: &Options,
    out: Option<&Path>,
    igb: bool,
) -> Result<Vec<String>> {
    let file = |path: PathBuf| value(&path);
    let [first, second] = files.drives();
    let mut all = Arguments::default();
    all.add(&["-machine", "q35,kernel-irqchip=split", "-smp", "2", "-m", &options.memory]);
    all.add(&["-display", "none", "-monitor", "none", "-no-reboot", "-nic", "none"]);
    // aw-bits: by default, QEMU 7.2's IOMMU has 39 address bits. With this default, a guest could not map a device BAR at an
    // address of more than 39 bits.
    all.add(&["-device", "intel-iommu,intremap=on,aw-bits=48"]);
    all.add(&["-kernel", plain(&boot.kernel)?, "-initrd", plain(&files.initramfs())?]);
    all.add(&["-append", &command_line(boot.parameters)]);
    all.add(&["-chardev", &format!("file,id=console,path={}", file(files.console())?), "-serial", "chardev:console"]);
    all.share("host", "/", ",readonly=on");
    all.add(&["-device", "virtio-serial-pci"]);
    for (name, path) in [("out", files.out()), ("err", files.err()), ("ctl", files.control())] {
        all.add(&["-chardev", &format!("file,id={name},path={}", file(path)?)]);
        all.add(&["-device", &format!("virtserialport,chardev={name},name=carom.{name}")]);
    }
    all.add(&["-drive", &format!("file={},if=none,id=nvme1,format=raw,cache=unsafe", file(first)?)]);
    all.add(&["-device", "nvme,drive=nvme1,serial=carom1,addr=0x5"]);
    // Reads of the second drive fail at one offset.
    let backing = format!("driver=file,node-name=nvme2-file,filename={},cache.no-flush=on", file(second)?);
    let failing = format!(
        "driver=blkdebug,node-name=nvme2,image=nvme2-file,inject-error.0.event=none,inject-error.0.iotype=read,\
         inject-error.0.sector={}",
        BAD_PLACE / 512
    );
    all.add(&["-blockdev", &backing, "-blockdev", &failing, "-device", "nvme,drive=nvme2,serial=carom2,addr=0x6"]);
    for ((path, slot), number) in files.more_drives(options.more_nvme).zip(FIRST_MORE_SLOT..).zip(0..) {
        all.add(&["-drive", &format!("file={},if=none,id=more{number},format=raw,cache=unsafe", file(path)?)]);
        // Give each drive few interrupts. The machine's two CPUs have about 400 interrupt vectors in total, and a VMM may
        // request all interrupts of a device.
        let interrupts = "max_ioqpairs=4,msix_qsize=5";
        all.add(&["-device", &format!("nvme,drive=more{number},serial=more{number},{interrupts},addr={slot:#x}")]);
    }
    if options.null_drive {
        // This drive discards writes, and its reads leave the memory unchanged. So the emulator copies no data, and only its
        // thread for this device works.
        let size = super::options::bytes(&options.nvme_size).context("--nvme-size: too large")?;
        all.add(&["-blockdev", &format!("driver=null-co,node-name=null,size={size},read-zeroes=off")]);
        all.add(&["-device", &format!("nvme,drive=null,serial=null,addr={NULL_SLOT:#x}")]);
    }
    for (address, mask) in [("0x7", "0xffffffffffffffff"), ("0x9", "0xffffffffffffffff"), ("0xa", "0xfffffff")] {
        all.add(&["-device", &format!("edu,addr={address},dma_mask={mask}")]);
    }
    all.network("net");
    all.add(&["-device", "e1000e,netdev=net,addr=0xb,romfile="]);
    // This card is behind a root port, because only root ports report errors of PCI Express devices to the kernel.
    all.add(&["-device", "pcie-root-port,id=root_port,chassis=1,addr=0xc", "-device", "e1000e,bus=root_port,romfile="]);
    all.add(&["-drive", &format!("file={},if=none,id=stick,format=raw,cache=unsafe", file(files.stick())?)]);
    all.add(&["-device", "qemu-xhci,id=usb,addr=0xd", "-device", "usb-storage,bus=usb.0,drive=stick"]);
    // The AHCI controller cannot reset itself, so it is behind a root port, which can.
    all.add(&["-device", "pcie-root-port,id=ahci_port,chassis=2,addr=0xe"]);
    all.add(&["-drive", &format!("file={},if=none,id=sata,format=raw,cache=unsafe", file(files.sata())?)]);
    all.add(&["-device", "ich9-ahci,id=ahci,bus=ahci_port", "-device", "ide-hd,bus=ahci.0,drive=sata"]);
    if igb {
        // The igb card has its own bus. On the first bus, its virtual functions would have the same addresses as other devices.
        all.add(&["-device", "pcie-root-port,id=igb_port,chassis=3,addr=0xf"]);
        all.network("igb_net");
        all.add(&["-device", "igb,netdev=igb_net,bus=igb_port,romfile="]);
    }
    // These two functions of one device share an IOMMU group. The first function cannot be passed through while the second
    // function has a driver. Tests check the error.
    all.add(&["-device", "edu,addr=0x8.0,multifunction=on", "-device", "virtio-rng-pci,addr=0x8.1"]);
    // The swap device has slot 0x1d, after the slot of `--disk`. Linux names disks by the order of their addresses, and `--disk`
    // must be the first disk.
    all.add(&["-drive", &format!("file={},if=none,id=swap,format=raw,cache=unsafe", file(files.swap())?)]);
    all.add(&["-device", "virtio-blk-pci,drive=swap,addr=0x1d"]);
    if let Some(out) = out {
        all.share("out", &value(out)?, "");
    }
    if options.terminal {
        all.add(&["-chardev", &format!("socket,id=tty,path={},server=on,wait=off", file(files.terminal())?)]);
        all.add(&["-device", "virtconsole,chardev=tty"]);
    }
    if let Some(disk) = &options.disk {
        all.add(&["-drive", &format!("file={},if=none,id=disk,format=raw,discard=unmap", value(disk)?)]);
        all.add(&["-device", "virtio-blk-pci,drive=disk"]);
    }
    Ok(all.0)
}

/// Returns the kernel's parameters.
fn command_line(parameters: &str) -> String {
    // no_timer_check: on a busy host, the emulated timer can be too late for the kernel's check at boot, and the kernel would
    // panic. tsc=unstable: if the kernel trusts the emulated TSC, timers of its guests sometimes stop. softlockup_panic: the
    // emulated CPUs sometimes wait for each other forever, and a panic ends the machine before its time limit.
    format!(
        "console=ttyS0 panic=-1 oops=panic softlockup_panic=1 hung_task_panic=1 watchdog_thresh=30 no_timer_check tsc=unstable \
         intel_iommu=on,sm_off mitigations=off quiet loglevel=4 {parameters}"
    )
}

#[derive(Default)]
struct Arguments(Vec<String>);

impl Arguments {
    fn add(&mut self, words: &[&str]) {
        self.0.extend(words.iter().copied().map(String::from));
    }

    /// Adds a network that contains only an echo server, at 10.0.2.100 port 7.
    fn network(&mut self, name: &str) {
        self.add(&["-netdev", &format!("user,id={name},restrict=on,guestfwd=tcp:10.0.2.100:7-cmd:cat")]);
    }

    /// Shares a host directory by 9p. `path` is a result of [`value`].
    fn share(&mut self, name: &str, path: &str, more: &str) {
        self.add(&["-fsdev", &format!("local,id={name},path={path},security_model=none,multidevs=remap{more}")]);
        self.add(&["-device", &format!("virtio-9p-pci,fsdev={name},mount_tag={name}")]);
    }
}

/// Returns a path as an argument without other text.
fn plain(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Returns a path as the value of an option. Commas are doubled, because a single comma would end the value.
fn value(path: &Path) -> Result<String> {
    Ok(plain(path)?.replace(',', ",,"))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn instruction_clock_is_single_threaded_and_tcg_only() {
        let with = accelerator("tcg", true);
        assert!(with.contains(&"-icount") && with.iter().any(|word| word.contains("thread=single")), "{with:?}");
        let without = accelerator("tcg", false);
        assert!(
            !without.contains(&"-icount") && without.iter().any(|word| word.contains("thread=multi")),
            "{without:?}"
        );
        assert_eq!(accelerator("kvm", true), accelerator("kvm", false));
    }

    fn boot() -> Boot {
        Boot { kernel: "/cache/vm linuz,1".into(), initramfs: "/cache/i".into(), parameters: "x=1" }
    }

    #[test]
    fn commas_and_blanks_in_names_stay_inside_their_values() {
        let files = Files(Path::new("/tmp/a, b"));

        let words = arguments(&files, &boot(), &Options::plain(), Some(Path::new("/srv/o,ut")), true).unwrap();

        let has = |word: &str| assert!(words.iter().any(|known| known == word), "{word} in {words:?}");
        has("/cache/vm linuz,1");
        has("/tmp/a, b/initramfs");
        has("file,id=console,path=/tmp/a,, b/console");
        has("file=/tmp/a,, b/nvme1.img,if=none,id=nvme1,format=raw,cache=unsafe");
        has("driver=file,node-name=nvme2-file,filename=/tmp/a,, b/nvme2.img,cache.no-flush=on");
        has("local,id=host,path=/,security_model=none,multidevs=remap,readonly=on");
        has("local,id=out,path=/srv/o,,ut,security_model=none,multidevs=remap");
    }

    #[test]
    fn plugin_gets_its_output_file() {
        let words = plugin(Path::new("/c/a,b.so"), Path::new("/o/instructions")).unwrap();
        assert_eq!(words, ["-plugin", "file=/c/a,,b.so,out=/o/instructions"]);
    }

    #[test]
    fn writable_directory_is_shared_only_if_given() {
        let words = arguments(&Files(Path::new("/tmp/a")), &boot(), &Options::plain(), None, true).unwrap();
        assert!(!words.iter().any(|word| word.contains("id=out,path=/srv") || word.contains("mount_tag=out")));
    }

    #[test]
    fn disk_and_terminal_exist_only_on_request() {
        let files = Files(Path::new("/tmp/a"));
        let plain = arguments(&files, &boot(), &Options::plain(), None, true).unwrap();
        assert!(!plain.iter().any(|word| word.contains("id=disk") || word.contains("id=tty")));
        let options = Options { disk: Some("/srv/a,b.raw".into()), terminal: true, ..Options::plain() };

        let words = arguments(&files, &boot(), &options, None, true).unwrap();

        let has = |part: &str| assert!(words.iter().any(|word| word.starts_with(part)), "{part} in {words:?}");
        has("file=/srv/a,,b.raw,if=none,id=disk,format=raw");
        has("socket,id=tty,path=/tmp/a/tty,server=on,wait=off");
    }

    #[test]
    fn card_missing_in_the_emulator_is_omitted_with_its_port() {
        let words = |igb| arguments(&Files(Path::new("/tmp/a")), &boot(), &Options::plain(), None, igb).unwrap();
        let (with, without) = (words(true), words(false));
        assert!(!without.iter().any(|word| word.contains("igb")), "{without:?}");
        assert_eq!(with.iter().filter(|word| word.contains("igb")).count(), 3, "{with:?}");
    }

    #[test]
    fn requested_drives_have_their_own_slots() {
        let files = Files(Path::new("/tmp/a"));
        let options = Options { more_nvme: 12, ..Options::plain() };

        let words = arguments(&files, &boot(), &options, None, true).unwrap();

        let slots = words.iter().filter(|word| word.starts_with("nvme,")).filter_map(|word| word.split_once("addr="));
        let slots: Vec<&str> = slots.map(|(_, slot)| slot).collect();
        assert_eq!((slots.len(), &slots[..4], slots[13]), (14, &["0x5", "0x6", "0x10", "0x11"][..], "0x1b"));
    }

    #[test]
    fn path_without_utf8_is_rejected() {
        let path = Path::new(OsStr::from_bytes(b"/tmp/\xff"));
        assert!(arguments(&Files(path), &boot(), &Options::plain(), None, true).is_err());
    }
}
