// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of hot-plugging devices, with a VM without a guest.

use super::*;

#[test]
fn hotplugged_device_is_removed_once_its_guest_releases_it() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    control.create(config("")).unwrap();
    assert_eq!(add(&mut control, "/a", None), Ok(None));
    control.boot().unwrap();
    assert_eq!(add(&mut control, "/b", None), Ok(Some("_vfio1".into())));
    assert_eq!(add(&mut control, "/c", Some("c")), Ok(Some("c".into())));
    let (all, without_b) = (["_vfio0", "_vfio1", "c"].map(String::from), ["_vfio0", "c"].map(String::from));
    assert_eq!(names(&mut control), (all.to_vec(), all.to_vec()));

    // The client asks for the same removal twice.
    for _ in 0..2 {
        control.serve_call(Call::RemoveDevice("_vfio1".into())).unwrap();
        assert_eq!(names(&mut control), (without_b.to_vec(), all.to_vec()));
    }
    let still = add(&mut control, "/b", None).unwrap_err();
    assert!(still.starts_with("--device path: /b belongs to a device"), "{still}");
    let still = add(&mut control, "/d", Some("_vfio1")).unwrap_err();
    assert!(still.starts_with("--device id: '_vfio1' belongs to a device"), "{still}");
    assert_eq!(add(&mut control, "/d", None), Ok(Some("_vfio2".into())), "an unused name");
    guest(&mut control, GuestEvent::Left);
    let gone = control.serve_call(Call::RemoveDevice("_vfio1".into())).unwrap_err();
    assert!(matches!(gone, ControlError::NoSuchPart(_)), "{gone}");
    assert_eq!(add(&mut control, "/b", None), Ok(Some("_vfio1".into())));
    control.delete();
}

#[test]
fn api_created_vm_and_hotplugged_devices_get_the_defaults() {
    let defaults = VmDefaults { iommu_bounce: "size=32M".parse().ok(), all_behind_iommu: true };
    let options = Options { defaults, no_shutdown: true, ..Options::default() };
    let mut control = Control::<Null>::new(EventMonitor::none(), options);
    control.serve_call(Call::Create(Box::new(config("")))).unwrap();
    control.boot().unwrap();
    add(&mut control, "/a", None).unwrap();
    let Ok(Reply::Info(info)) = control.serve_call(Call::Info) else { panic!("no answer") };
    assert!(info.config.devices[0].iommu && info.config.has_iommu());
    assert_eq!(info.config.iommu_bounce.as_ref().unwrap().size, 32 << 20);
    control.delete();

    // The defaults do not apply to a VM from the command line.
    control.create(config("")).unwrap();
    let Ok(Reply::Info(info)) = control.serve_call(Call::Info) else { panic!("no answer") };
    assert!(info.config.iommu_bounce.is_none());
}

#[test]
fn refused_device_changes_nothing() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options::default());
    control.create(config("")).unwrap();
    control.boot().unwrap();
    add(&mut control, "/a", Some("a")).unwrap();
    let before = names(&mut control);
    for (path, id, why) in [
        ("/fail", None, "cannot be opened"),
        ("/a", None, "--device path: /a is given twice"),
        ("/b", Some("a"), "'a' is"),
    ] {
        let error = add(&mut control, path, id).unwrap_err();
        assert!(error.contains(why), "{error}");
        assert_eq!(names(&mut control), before);
    }
    let unknown = control.serve_call(Call::RemoveDevice("_iommu".into())).unwrap_err();
    assert_eq!(unknown.to_string(), "there is no device '_iommu': vm.info lists the devices");
    control.delete();
}

#[test]
fn removal_is_completed_by_reset_or_shutdown_and_lasts() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    control.create(config("")).unwrap();
    control.boot().unwrap();
    for path in ["/a", "/b", "/c"] {
        add(&mut control, path, Some(&path[1..])).unwrap();
    }
    control.serve_call(Call::RemoveDevice("a".into())).unwrap();
    guest(&mut control, GuestEvent::Reset);
    assert_eq!(names(&mut control).1, ["b", "c"]);
    control.serve_call(Call::RemoveDevice("b".into())).unwrap();
    control.serve_call(Call::Shutdown).unwrap();
    control.serve_call(Call::Boot).unwrap();
    assert_eq!(names(&mut control), (vec!["c".into()], vec!["c".into()]));
    control.delete();
}

#[test]
fn devices_of_all_kinds_are_added_and_removed_alike() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
    let add = |control: &mut Control<Null>, text: &str| {
        let device = PartConfig::VfioUser(text.parse().unwrap());
        match control.serve_call(Call::AddDevice(device)) {
            Ok(Reply::Done) => Ok(None),
            Ok(Reply::Added(info)) => Ok(Some(info.id)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    };
    let remove = |control: &mut Control<Null>, id: &str| {
        control.serve_call(Call::RemoveDevice(id.into())).map(drop).map_err(|error| error.to_string())
    };
    let sockets = |control: &mut Control<Null>| match control.serve_call(Call::Info) {
        Ok(Reply::Info(info)) => {
            info.config.user_devices.into_iter().map(|device| (device.socket, device.id.unwrap())).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    control.create(config("")).unwrap();
    assert!(add(&mut control, "socket=/s").unwrap_err().starts_with("--user-device iommu: is off"));
    assert_eq!(add(&mut control, "socket=/s,iommu=on"), Ok(None));
    assert_eq!(add(&mut control, "socket=/t,iommu=on,id=u"), Ok(None));
    assert!(add(&mut control, "socket=/t,iommu=on").unwrap_err().contains("/t is given twice"));
    let both = [("/s".into(), "_vfio_user0".into()), ("/t".into(), "u".into())];
    assert_eq!(sockets(&mut control), both);
    control.boot().unwrap();

    assert_eq!(add(&mut control, "socket=/v,iommu=on"), Ok(Some("_vfio_user1".into())));
    assert!(add(&mut control, "socket=/w").unwrap_err().starts_with("--user-device iommu: is off"));
    assert!(add(&mut control, "socket=/fail,iommu=on").unwrap_err().contains("cannot be opened"));
    remove(&mut control, "u").unwrap();
    let still = add(&mut control, "socket=/t,iommu=on").unwrap_err();
    assert!(still.starts_with("--user-device socket: /t belongs to a device"), "{still}");
    let left = [("/s".into(), "_vfio_user0".into()), ("/v".into(), "_vfio_user1".into())];
    assert_eq!(sockets(&mut control), left);
    assert_eq!(names(&mut control).1, ["_vfio_user0", "_vfio_user1", "u"]);
    guest(&mut control, GuestEvent::Left);
    assert_eq!(names(&mut control).1, ["_vfio_user0", "_vfio_user1"]);
    assert_eq!(add(&mut control, "socket=/t,iommu=on"), Ok(Some("_vfio_user2".into())));

    control.serve_call(Call::Shutdown).unwrap();
    remove(&mut control, "_vfio_user0").unwrap();
    assert_eq!(sockets(&mut control).len(), 2);
    assert!(remove(&mut control, "_vfio_user0").unwrap_err().contains("there is no device"));
    control.delete();
}
