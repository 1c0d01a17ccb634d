// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the form with made-up results.

use super::*;
use crate::demo::report;
use crate::demo::results::tests::{results, sample};
use crate::demo::results::{Configs, Results};
use crate::demo::samples::Samples;

fn stored() -> Results {
    let config = |name: &str, iops: u32, requests: &str| {
        let fio: Vec<String> =
            BLOCK_SIZES.iter().map(|size| format!(r#""{size}":{{"iops":{iops},"mib_s":1}}"#)).collect();
        format!(
            r#"{{"name":"{name}","vmm":"carom","fio":{{{}}},"dma_map":{{"map_us":1.25,"unmap_us":2}},
            "requests":{requests},"pinned_bytes":104857600,"retries":0}}"#,
            fio.join(",")
        )
    };
    let requests = r#"{"map":11,"unmap":12,"window_add":13,"window_del":0,"attach":1}"#;
    let text = format!(
        r#"{{"machine":{{"host":"h","rig":"tcg","kernel":"k","guest_ram_bytes":2147483648}},"versions":{{"carom":"1"}},
        "quick":true,"rounds":1,"failures":["lazy: it failed"],"configs":[{},{},{},{}]}}"#,
        config("no-viommu", 4000, "null"),
        config("strict", 1000, requests),
        config("bounce", 3600, requests),
        config("qemu-strict", 800, "null"),
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn table_has_ratios_requests_and_failures() {
    let text = report::table(&stored());
    assert!(text.contains("3600 (3.60, 0.90)"), "{text}");
    assert!(text.contains("bounce ÷ qemu-strict: 4.50 at 4k"), "{text}");
    assert!(text.contains("\nstrict ÷ qemu-strict: 1.25 at 4k"), "{text}");
    assert!(
        text.lines().any(|line| line.contains("bounce") && line.contains("13") && line.contains("4.9 %")),
        "{text}"
    );
    assert!(text.contains("FAILED: lazy: it failed"), "{text}");
}

#[test]
fn ratio_to_a_failed_configuration_stays_empty() {
    let mut results = stored();
    let Configs::Plain(configs) = &mut results.configs else { panic!("{results:?}") };
    configs.retain(|config| config.name != "strict");
    assert!(report::table(&results).contains("3600 (–, 0.90)"));
}

#[test]
fn failed_guest_is_a_failure_and_the_others_count() {
    let measured = |round: u32, iops: f64| {
        let figures = Plain {
            vmm: "carom".into(),
            fio: BLOCK_SIZES.map(|size| (size.into(), Fio { iops, mib_s: 1.0 })).into(),
            dma_map: DmaMap { map_us: iops, unmap_us: 1.0 },
            dma_map_to_device: None,
            requests: None,
            pinned_bytes: u64::from(round),
            verified_bytes: None,
        };
        sample("lazy", round, Ok(figures))
    };
    let failed = sample("lazy", 1, Err("it failed"));
    let results = results(4, &[measured(0, 10.0), failed, measured(2, 30.0), measured(3, 11.0)]);
    assert_eq!(results.failures, ["lazy: it failed"]);
    let Configs::Plain(configs) = &results.configs else { panic!("{results:?}") };
    let [config::Config { figures, .. }] = &configs[..] else { panic!("one configuration wanted") };
    assert_eq!((figures.fio["4k"].iops, figures.fio_rounds.len(), figures.pinned_bytes), (11.0, 3, 3));
    assert!(figures.fio_2_jobs.is_none());
}

#[test]
fn noted_figures_are_read_and_written_as_they_were() {
    let line = r#"{"End":{"name":"strict","round":0,"two_jobs":true,"measured":{"Ok":{"vmm":"carom",
        "versions":{"fio":"3"},"fio":{"4k":{"iops":1.5,"mib_s":2.5}},"dma_map":{"map_us":1.5,"unmap_us":2.5},
        "dma_map_to_device":null,"requests":{"map":11,"unmap":12,"window_add":13,"window_del":0,"attach":1},"pinned_bytes":4096,
        "verified_bytes":null,"retries":1}}}}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("samples");
    std::fs::write(&path, line.replace('\n', "") + "\n").unwrap();
    let mut samples: Samples<Plain> = Samples::open(&path).unwrap();
    let [sample] = &samples.all[..] else { panic!("one sample wanted") };
    samples.end(sample.clone()).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let again: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(text.lines().count(), 2);
    assert_eq!(again, serde_json::from_str::<serde_json::Value>(line).unwrap());
}
