// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks that, in a build without bouncing, the mapping functions have the same instructions as in mainline. Counts their instructions in
//! a build with bouncing.

use std::process::Command;

use anyhow::{Result, ensure};

use super::tree::{CheckTree, Mode};

/// Functions of `drivers/iommu/dma-iommu.c`, without the prefix `iommu_dma_`. Each series has only some of these functions.
const FUNCTIONS: [&str; 10] = [
    "map_page",
    "unmap_page",
    "map_phys",
    "unmap_phys",
    "map_sg",
    "unmap_sg",
    "sync_single_for_cpu",
    "sync_single_for_device",
    "sync_sg_for_cpu",
    "sync_sg_for_device",
];

const OBJECT: &str = "drivers/iommu/dma-iommu.o";

impl CheckTree<'_> {
    pub(super) fn check_code(&mut self) -> Result<String> {
        self.patch_all()?;
        let on = self.disassembled(Mode::On, "patched")?;
        let off = self.disassembled(Mode::Off, "patched")?;
        let mut objdump = Command::new("objdump");
        objdump.args(["-r", "-j", "__jump_table"]).arg(self.object(Mode::On, OBJECT));
        let table = self.tools.output(&mut objdump)?;
        let keys = table.lines().filter(|line| line.contains("dma_bounce_key")).count();
        self.fresh()?;
        let mainline = self.disassembled(Mode::Off, "unpatched")?;
        self.tools.progress.end();
        println!("{:<24} {:>9} {:>7} {:>7}", "instructions of", "unpatched", "off", "on");
        for function in FUNCTIONS {
            let name = format!("iommu_dma_{function}");
            let code = code_of(&mainline, &name);
            if code.is_empty() {
                continue;
            }
            let without = code_of(&off, &name);
            ensure!(code == without, "with bouncing compiled out, function {name} differs from mainline's");
            let with = instructions(&code_of(&on, &name));
            println!("{function:<24} {:>9} {:>7} {with:>7}", instructions(&code), instructions(&without));
        }
        Ok(format!(
            "with bouncing compiled out, these functions equal mainline's; compiled in, they have {keys} branches on the static key"
        ))
    }

    /// Returns the object's instructions and relocations. Addresses are relative to functions.
    fn disassembled(&self, mode: Mode, what: &str) -> Result<String> {
        self.tools.progress.show(&format!("compiling dma-iommu.c, {what}, bouncing {mode}"));
        self.configure(mode)?;
        self.build_only(mode, &[], &[OBJECT.into()])?;
        let mut objdump = Command::new("objdump");
        objdump.args(["-dr", "--no-show-raw-insn", "--no-addresses"]).arg(self.object(mode, OBJECT));
        self.tools.output(&mut objdump)
    }
}

/// Returns the lines of one function.
fn code_of<'text>(disassembled: &'text str, name: &str) -> Vec<&'text str> {
    let head = format!("<{name}>:");
    let lines = disassembled.lines().skip_while(|line| line.split_whitespace().next() != Some(&head));
    lines.skip(1).take_while(|line| !line.is_empty()).collect()
}

/// Counts the lines that are instructions, not relocations or padding.
fn instructions(code: &[&str]) -> usize {
    let is_padding = |line: &str| {
        ["R_X86_64", "nop", "int3"].iter().any(|word| line.contains(word))
            || (line.contains("xchg ") && line.ends_with(" %ax,%ax"))
    };
    code.iter().filter(|line| !is_padding(line)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_a_function_are_counted() {
        let text = "x.o: file format elf64\n\n<a>:\n\tpush %rbp\n\tcall b\n\t\t\tR_X86_64_PLT32 b-0x4\n\txchg   %ax,%ax\n\tret\n\tint3\n\n<b>:\n\tret\n";
        assert_eq!(code_of(text, "a").len(), 6);
        assert_eq!(instructions(&code_of(text, "a")), 3);
        assert_eq!(code_of(text, "b"), ["\tret"]);
        assert!(code_of(text, "c").is_empty());
    }
}
