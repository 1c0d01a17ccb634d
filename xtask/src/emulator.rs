// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rig's emulator: QEMU built from Debian's source. [`MENDS`] fixes four bugs in its emulation of nested guests and one bug
//! in its NVMe drive. The patches in `xtask/qemu` make its TLB behave more like hardware's, and remove the slowdown of memory
//! that once held code.
//!
//! First bug: `helper_vmrun` (target/i386/tcg/system/svm_helper.c of QEMU 10.0) delivers the interrupt that KVM injects, but leaves the
//! interrupt's vector where the CPU loop looks for pending exceptions. Each device interrupt asks the CPU to leave that loop.
//! `cpu_handle_interrupt` (accel/tcg/cpu-exec.c) first checks for interrupts, and then for such requests to leave. If a request arrives
//! between the two checks, the guest gets the injected interrupt again, unless the guest has had an exception or an exit since the
//! injection. The guest gets this interrupt even while it has interrupts disabled. At the first instruction of a kernel's entry, the
//! repeated interrupt causes a double fault.
//!
//! Second bug: `cpu_clear_ignne` (`fpu_helper.c`), which XRSTOR on any CPU calls, writes the first CPU's `hflags2` without a lock or an
//! atomic operation. If the first CPU executes VMRUN or #VMEXIT meanwhile, that CPU changes other bits of `hflags2`: the bit for nested
//! paging, or the global interrupt flag. This change is then lost. The result is a triple fault of the guest or a panic of its host.
//! Nothing in the rig ever sets the bit that `cpu_clear_ignne` clears. So the fix skips the write if the bit is already clear.
//!
//! Third bug: `helper_vmrun` sets a bit of `interrupt_request` without the lock that all other writers hold. If another thread makes a
//! request at the same time, the bit of that request can be lost. The CPU then notices that request only when the next request arrives.
//!
//! Fourth bug: if a guest writes CR8 while a virtual interrupt is pending, `helper_write_crN` (`misc_helper.c`) requests that interrupt,
//! also without this lock. An assertion then ends the emulator. EDK2 writes CR8 at the end of each interrupt.
//!
//! Fifth bug: `nvme_ctrl_reset` (hw/nvme/ctrl.c) discards the queues but not their pending requests for the drive's INTx
//! interrupt. The interrupt then stays asserted forever.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::key::{Key, files_below};
use crate::tools::Tools;

/// Replacement of text in a file.
struct Mend {
    file: &'static str,
    /// Old text, which must occur exactly once.
    text: &'static str,
    by: &'static str,
}

const MENDS: [Mend; 6] = [
    Mend {
        file: "target/i386/tcg/system/svm_helper.c",
        text: "do_interrupt_x86_hardirq(env, vector, 1);",
        by: "do_interrupt_x86_hardirq(env, vector, 1); cs->exception_index = -1;",
    },
    Mend {
        file: "target/i386/tcg/system/svm_helper.c",
        text: "cs->interrupt_request |= CPU_INTERRUPT_VIRQ;",
        by: "bql_lock(); cs->interrupt_request |= CPU_INTERRUPT_VIRQ; bql_unlock();",
    },
    Mend {
        file: "target/i386/tcg/system/svm_helper.c",
        text: "#include \"qemu/log.h\"",
        by: "#include \"qemu/log.h\"\n#include \"qemu/main-loop.h\"",
    },
    Mend {
        file: "target/i386/tcg/system/fpu_helper.c",
        text: "env->hflags2 &= ~HF2_IGNNE_MASK;",
        by: "if (env->hflags2 & HF2_IGNNE_MASK) env->hflags2 &= ~HF2_IGNNE_MASK;",
    },
    Mend {
        file: "target/i386/tcg/system/misc_helper.c",
        text: "cpu_interrupt(cs, CPU_INTERRUPT_VIRQ);",
        by: "bql_lock(); cpu_interrupt(cs, CPU_INTERRUPT_VIRQ); bql_unlock();",
    },
    Mend {
        file: "hw/nvme/ctrl.c",
        text: "n->qs_created = false;",
        by: "n->qs_created = false; n->irq_status = 0; n->cq_pending = 0; nvme_irq_check(n);",
    },
];

/// Features that the rig uses. All other optional features are off.
const FEATURES: &str = "--target-list=x86_64-softmmu --without-default-features --disable-download --disable-docs --disable-tools \
     --disable-debug-info --disable-werror --disable-install-blobs --enable-tcg --enable-virtfs --enable-attr --enable-slirp \
     --enable-fdt=system";

const PACKAGES: [&str; 11] = [
    "gcc",
    "patch",
    "libc6-dev",
    "python3-venv",
    "ninja-build",
    "pkg-config",
    "libglib2.0-dev",
    "zlib1g-dev",
    "libattr1-dev",
    "libslirp-dev",
    "libfdt-dev",
];

/// Option that enables plug-ins. Only the counting emulator has this option, because plug-in support slows down each access to memory.
const PLUGINS: &str = " --enable-plugins";

/// Header for compiling plug-ins.
const HEADER: &str = "qemu-plugin.h";

/// File name of the plug-in.
const PLUGIN: &str = "counts.so";

impl Tools<'_> {
    /// Returns the directory of `qemu-system-x86_64`. Builds QEMU if it is missing.
    pub(crate) fn mended_qemu(&self) -> Result<PathBuf> {
        self.qemu_with(FEATURES)
    }

    /// Does the same as [`Tools::mended_qemu`], for a QEMU with plug-ins. The directory also contains [`HEADER`].
    pub(crate) fn counting_qemu(&self) -> Result<PathBuf> {
        self.qemu_with(&[FEATURES, PLUGINS].concat())
    }

    /// Returns the plug-in that counts instructions between marks (`tests/integration/plugin/counts.c`), for the counting
    /// emulator.
    ///
    /// # Errors
    /// Fails if the plug-in cannot be built, or on a signal.
    pub fn counting_plugin(&self) -> Result<PathBuf> {
        let source = self.checkout.join("tests/integration/plugin/counts.c");
        let emulator = self.counting_qemu()?;
        let key = Key::default().path(&source)?.path(&emulator.join(HEADER))?.finish();
        let dir = self.cached("qemu-plugin", &key, |dir| {
            self.need_packages("building a plug-in of the rig's emulator", &["gcc", "libc6-dev", "libglib2.0-dev"])?;
            let flags = self.output(Command::new("pkg-config").args(["--cflags", "glib-2.0"]))?;
            let mut gcc = Command::new("gcc");
            gcc.args(["-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", "-I"]).arg(&emulator);
            gcc.args(flags.split_whitespace()).arg("-o").arg(dir.join(PLUGIN)).arg(&source);
            self.run(&mut gcc)
        })?;
        Ok(dir.join(PLUGIN))
    }

    fn qemu_with(&self, features: &str) -> Result<PathBuf> {
        let version = self.source_version("qemu")?;
        // When a change to this code changes the built QEMU, increase this number.
        let mut key = Key::default().text(&version).text("recipe 2").text(features);
        for mend in MENDS {
            key = key.text(mend.file).text(mend.text).text(mend.by);
        }
        let key = key.path(&self.emulator_patches())?.path(&self.requirements())?.finish();
        self.cached("qemu", &key, |dir| self.build_qemu(&version, features, dir))
    }

    /// Returns the directory with the patches that are applied after [`MENDS`].
    fn emulator_patches(&self) -> PathBuf {
        self.checkout.join("xtask/qemu")
    }

    /// Returns the list of Python packages that the build needs.
    fn requirements(&self) -> PathBuf {
        self.checkout.join("scripts/lib/qemu-build.txt")
    }

    fn build_qemu(&self, version: &str, features: &str, dir: &Path) -> Result<()> {
        let release = release(version);
        let (tree, python) = (dir.join("tree"), dir.join("python"));
        self.need_packages("building the rig's emulator", &PACKAGES)?;
        self.progress.show(&format!("fetching QEMU {release}"));
        self.fetch_source("qemu", version, &tree)?;
        mend_tree(&tree)?;
        let mut patches: Vec<PathBuf> =
            files_below(&self.emulator_patches())?.into_iter().map(|(file, _)| file).collect();
        patches.sort();
        for patch in patches {
            self.patch(&tree, &self.emulator_patches().join(patch))?;
        }
        self.progress.show(&format!("configuring QEMU {release}"));
        self.run(Command::new("python3").args(["-m", "venv"]).arg(&python))?;
        let interpreter = python.join("bin/python");
        let mut pip = Command::new(&interpreter);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(self.requirements());
        self.run(&mut pip)?;
        let mut configure = Command::new("./configure");
        configure
            .arg(format!("--python={}", interpreter.display()))
            .args(features.split(' ').filter(|word| !word.is_empty()));
        self.run_quietly(configure.current_dir(&tree), &dir.join("log"))?;
        let mut ninja = Command::new("ninja");
        ninja.arg("-C").arg(tree.join("build")).arg("qemu-system-x86_64");
        self.run_watched(&mut ninja, &dir.join("log"), |line| {
            if let Some((step, all)) = step(line) {
                self.progress.show(&format!("compiling QEMU {release}: step {step} of {all}"));
            }
        })?;
        let program = "qemu-system-x86_64";
        self.run(Command::new("strip").arg("-o").arg(dir.join(program)).arg(tree.join("build").join(program)))?;
        if features.ends_with(PLUGINS) {
            fs::copy(tree.join("include/qemu").join(HEADER), dir.join(HEADER))
                .context("cannot copy qemu-plugin.h from QEMU's source")?;
        }
        for made in [tree, python] {
            fs::remove_dir_all(&made).with_context(|| format!("cannot remove {}", made.display()))?;
        }
        Ok(())
    }
}

/// Returns QEMU's own version, given the version of the Debian package.
fn release(version: &str) -> &str {
    let upstream = version.split_once(':').map_or(version, |(_, upstream)| upstream);
    upstream.split_once('+').map_or(upstream, |(release, _)| release)
}

/// Returns ninja's step and the number of steps from a line `[STEP/ALL] …`.
fn step(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix('[')?.split_once(']')?.0.split_once('/')
}

/// Fixes the bugs. Also empties the list of firmware in pc-bios/meson.build, because Debian's source lacks this firmware.
fn mend_tree(tree: &Path) -> Result<()> {
    for mend in MENDS {
        let path = tree.join(mend.file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mended = mended(&text, &mend).with_context(|| path.display().to_string())?;
        fs::write(&path, mended).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let firmware = tree.join("pc-bios/meson.build");
    fs::write(&firmware, "roms = []\n").with_context(|| format!("cannot write {}", firmware.display()))
}

fn mended(text: &str, mend: &Mend) -> Result<String> {
    ensure!(
        text.matches(mend.text).count() == 1,
        "must contain '{}' exactly once; adapt MENDS in xtask/src/emulator.rs to this QEMU release",
        mend.text
    );
    Ok(text.replace(mend.text, mend.by))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_replaced_only_if_it_occurs_once() {
        let mend = &MENDS[3];
        let text = "a\n    env->hflags2 &= ~HF2_IGNNE_MASK;\n}\n";
        let expected = "a\n    if (env->hflags2 & HF2_IGNNE_MASK) env->hflags2 &= ~HF2_IGNNE_MASK;\n}\n";
        assert_eq!(mended(text, mend).unwrap(), expected);
        assert!(mended("", mend).is_err());
        assert!(mended(&[text, text].concat(), mend).is_err());
    }

    #[test]
    fn version_and_steps_are_read() {
        assert_eq!(release("1:10.0.3+ds-0+deb13u1~bpo12+1"), "10.0.3");
        assert_eq!(release("9.2"), "9.2");
        assert_eq!(step("[7/950] Compiling C object x.o"), Some(("7", "950")));
        assert_eq!(step("ninja: entering"), None);
    }
}
