// SPDX-License-Identifier: GPL-2.0-only
/*
 * Devices that wait for a driver of the virtio-iommu
 *
 * A kernel that knows VIOT, the ACPI table of virtual IOMMUs, binds no driver to a device behind
 * one before the IOMMU subsystem has a driver for it. So it is told of one, which then wants none
 * of the devices: they have no DMA operations of the subsystem's, and their drivers are bound.
 */

#include <linux/iommu.h>
#include <linux/module.h>

#include "virtio-iommu-bounce.h"

static struct iommu_device *want_none(struct device *dev)
{
	return ERR_PTR(-ENODEV);
}

static const struct iommu_ops ops = {
	.probe_device	= want_none,
	.owner		= THIS_MODULE,
};

/**
 * vib_stop_waiting - let drivers be bound to the devices behind the virtio-iommu
 * @device: the virtio-iommu
 *
 * Return: 0 or an error.
 */
int vib_stop_waiting(struct vib_device *device)
{
	struct device *parent = device->vdev->dev.parent;
	int ret;

	/* Without a name there is no device that waits for it. */
	if (!IS_ENABLED(CONFIG_ACPI_VIOT) || !dev_fwnode(parent))
		return 0;
	ret = iommu_device_register(&device->iommu, &ops, parent);
	if (ret)
		device->iommu.ops = NULL;
	return ret;
}
