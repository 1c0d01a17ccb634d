// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What options are called in JSON.

/// The field of a `VmConfig` that says the same as `option`, such as `memory.size` for `--memory size`. What is no option is a
/// field already.
pub(crate) fn field_of(option: &str) -> String {
    match option {
        "--kernel" => "payload.kernel".to_string(),
        "--initramfs" => "payload.initramfs".to_string(),
        "--cmdline" => "payload.cmdline".to_string(),
        "--cpus boot" => "cpus.boot_vcpus".to_string(),
        "--cpus max" => "cpus.max_vcpus".to_string(),
        option => {
            let field = option.trim_start_matches("--").replace(' ', ".").replace('-', "_");
            let (head, rest) = field.split_once('.').map_or((&*field, ""), |(head, _)| (head, &field[head.len()..]));
            let list = if matches!(head, "device" | "user_device") { "s" } else { "" };
            format!("{head}{list}{rest}")
        }
    }
}
