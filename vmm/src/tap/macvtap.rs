// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! macvtap interfaces. A macvtap interface is on top of another interface of the host. Each macvtap interface has a character device,
//! through which Carom reads and writes packets (`drivers/net/macvtap.c`, `drivers/net/tap.c`). The device supports the ioctl calls of tap
//! interfaces.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

/// Directory of the host's interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Character device of a macvtap interface.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Macvtap {
    node: PathBuf,
    /// Device number in sysfs' format: `MAJOR:MINOR`.
    number: String,
    /// Ethernet address of the interface in sysfs' format.
    address: String,
}

/// Returns the character device of this interface, if it is a macvtap interface.
pub(super) fn find(name: &str) -> Option<Macvtap> {
    find_in(Path::new(INTERFACES), name)
}

fn find_in(interfaces: &Path, name: &str) -> Option<Macvtap> {
    let interface = interfaces.join(name);
    let read = |path: PathBuf| fs::read_to_string(path).ok().map(|text| text.trim().to_string());
    let tap = format!("tap{}", read(interface.join("ifindex"))?);
    // Some kernels put the tap's directory into a directory `macvtap`.
    let number =
        read(interface.join("macvtap").join(&tap).join("dev")).or_else(|| read(interface.join(&tap).join("dev")))?;
    let address = read(interface.join("address")).unwrap_or_default();
    Some(Macvtap { node: Path::new("/dev").join(tap), number, address })
}

impl Macvtap {
    /// Opens the character device. Each open file serves one pair of queues.
    pub(super) fn open(&self) -> io::Result<File> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", self.node.display()));
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&self.node).map_err(named)?;
        let metadata = file.metadata()?;
        let number = format!("{}:{}", major(metadata.rdev()), minor(metadata.rdev()));
        if !metadata.file_type().is_char_device() || number != self.number {
            let rule = format!(
                "is not the interface's character device, which has the device number {}: create the device file with this number (mknod)",
                self.number
            );
            return Err(named(io::Error::other(rule)));
        }
        Ok(file)
    }

    /// Returns the path of the character device.
    pub(super) fn node(&self) -> &Path {
        &self.node
    }

    /// True if the interface has this Ethernet address.
    pub(super) fn has_address(&self, mac: [u8; 6]) -> bool {
        let text: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        self.address.eq_ignore_ascii_case(&text.join(":"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an interface in a fake sysfs, with these files.
    fn interface(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("mv0").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn character_device_has_the_index_of_its_interface() {
        for place in ["macvtap/tap12/dev", "tap12/dev"] {
            let root = interface(&[("ifindex", "12\n"), (place, "241:3\n"), ("address", "02:00:00:00:00:AB\n")]);

            let found = find_in(root.path(), "mv0").unwrap();

            assert_eq!((found.node.to_str().unwrap(), found.number.as_str()), ("/dev/tap12", "241:3"));
            assert!(found.has_address([2, 0, 0, 0, 0, 0xab]) && !found.has_address([2, 0, 0, 0, 0, 0xac]));
        }
    }

    #[test]
    fn other_interfaces_have_none() {
        let root = interface(&[("ifindex", "12\n"), ("macvtap/tap13/dev", "241:3\n")]);
        assert_eq!((find_in(root.path(), "mv0"), find_in(root.path(), "mv1"), find("lo")), (None, None, None));
    }

    #[test]
    fn node_of_another_device_is_not_taken() {
        let macvtap = |node: &str| Macvtap { node: node.into(), number: "241:3".into(), address: String::new() };
        let refused = |node: &str| macvtap(node).open().unwrap_err().to_string();
        assert_eq!(
            refused("/dev/null"),
            "/dev/null: is not the interface's character device, which has the device number 241:3: create the device file with this number (mknod)"
        );
        assert!(refused("/dev/tap-none").starts_with("/dev/tap-none: No such file"));
    }
}
