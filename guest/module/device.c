// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtio-iommu: what it offers, and where its windows appear. Faults are not listened to.
 */

#include <linux/bitmap.h>
#include <linux/io.h>
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ids.h>

#include <asm/memtype.h>
#include <asm/pgtable.h>

#include "virtio-iommu-bounce.h"

/* Whether the page tables say write-back: what was asked for may have become something else. */
static bool mapped_write_back(void *region, u64 len)
{
	unsigned int level;
	pteval_t uncached;
	pte_t *pte;
	u64 offset;

	for (offset = 0; offset < len; offset += SZ_2M) {
		pte = lookup_address((unsigned long)region + offset, &level);
		if (!pte)
			return false;
		uncached = _PAGE_PWT | _PAGE_PCD;
		uncached |= level == PG_LEVEL_4K ? _PAGE_PAT : _PAGE_PAT_LARGE;
		if (pte_flags(*pte) & uncached)
			return false;
	}
	return true;
}

static int map_region(struct vib_device *device)
{
	struct device *dev = &device->vdev->dev;
	struct virtio_shm_region region;

	if (!pat_enabled() ||
	    !virtio_get_shm_region(device->vdev, &region, VIRTIO_IOMMU_WINDOW_SHMID))
		return -ENODEV;
	device->region_len = round_down(region.len, device->chunk_size);
	if (!device->region_len || !IS_ALIGNED(region.addr, device->chunk_size) ||
	    device->region_len / device->chunk_size > INT_MAX)
		return -EINVAL;
	device->shown = devm_bitmap_zalloc(dev, device->region_len / device->chunk_size,
					   GFP_KERNEL);
	if (!device->shown)
		return -ENOMEM;
	if (!devm_request_mem_region(dev, region.addr, device->region_len, "bounce windows"))
		return -EBUSY;
	device->region = devm_memremap(dev, region.addr, device->region_len, MEMREMAP_WB);
	if (IS_ERR(device->region))
		return PTR_ERR(device->region);
	return mapped_write_back(device->region, device->region_len) ? 0 : -EOPNOTSUPP;
}

static int read_config(struct vib_device *device)
{
	struct virtio_device *vdev = device->vdev;
	u64 last, page_sizes;

	virtio_cread_le(vdev, struct virtio_iommu_config, page_size_mask, &page_sizes);
	if (!(page_sizes & (2 * PAGE_SIZE - 1)))
		return -EINVAL;
	device->input_end = U64_MAX;
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_INPUT_RANGE, struct virtio_iommu_config,
				input_range.end, &device->input_end);
	device->last_domain = U32_MAX;
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_DOMAIN_RANGE, struct virtio_iommu_config,
				domain_range.start, &device->first_domain);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_DOMAIN_RANGE, struct virtio_iommu_config,
				domain_range.end, &device->last_domain);
	virtio_cread_le_feature(vdev, VIRTIO_IOMMU_F_PROBE, struct virtio_iommu_config,
				probe_size, &device->probe_size);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_start,
			&device->iova_start);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_iova_end, &last);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, window_chunk_size,
			&device->chunk_size);
	virtio_cread_le(vdev, struct virtio_iommu_window_config, bounce_threshold,
			&device->advised);
	if (!is_power_of_2(device->chunk_size) || device->chunk_size < VIB_MIN_CHUNK ||
	    device->chunk_size > VIB_MAX_CHUNK || last < device->iova_start ||
	    !IS_ALIGNED(device->iova_start, device->chunk_size) || device->probe_size > SZ_64K)
		return -EINVAL;
	device->iova_len = round_down(last - device->iova_start + 1, device->chunk_size);
	return device->iova_len ? 0 : -EINVAL;
}

/* No endpoint is left: their drivers are unbound first, see the device link of each. */
static void vib_remove(struct virtio_device *vdev)
{
	struct vib_device *device = vdev->priv;

	if (device->iommu.ops)
		iommu_device_unregister(&device->iommu);
	vib_endpoints_end();
	virtio_reset_device(vdev);
	device->vq = NULL;
	vdev->config->del_vqs(vdev);
}

static int vib_probe(struct virtio_device *vdev)
{
	struct vib_device *device;
	struct virtqueue *vq;
	int ret;

	/* All that there is here needs windows; without them the device is left to others. */
	if (!virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW) &&
	    !virtio_has_feature(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH))
		return -ENODEV;
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1) ||
	    !virtio_has_feature(vdev, VIRTIO_IOMMU_F_MAP_UNMAP))
		return -ENODEV;
	device = devm_kzalloc(&vdev->dev, sizeof(*device), GFP_KERNEL);
	if (!device)
		return -ENOMEM;
	device->vdev = vdev;
	spin_lock_init(&device->lock);
	ret = read_config(device);
	if (!ret)
		ret = map_region(device);
	if (ret) {
		dev_err(&vdev->dev, "windows cannot be used: %d\n", ret);
		return ret;
	}
	device->buffer_len = sizeof(struct virtio_iommu_req_probe) + device->probe_size +
			     sizeof(struct virtio_iommu_req_tail);
	device->buffer = devm_kzalloc(&vdev->dev, device->buffer_len, GFP_KERNEL);
	if (!device->buffer)
		return -ENOMEM;
	vq = virtio_find_single_vq(vdev, NULL, "request");
	if (IS_ERR(vq))
		return PTR_ERR(vq);
	device->vq = vq;
	virtio_device_ready(vdev);
	vdev->priv = device;
	vib_endpoints_begin(device);
	ret = vib_stop_waiting(device);
	if (ret) {
		vib_remove(vdev);
		return ret;
	}
	dev_info(&vdev->dev, "windows at IOVA %#llx-%#llx, chunks of %llu KiB\n",
		 device->iova_start, device->iova_start + device->iova_len - 1,
		 device->chunk_size >> 10);
	return 0;
}

#ifdef CONFIG_PM_SLEEP
/* A reset would end all domains while drivers have memory mapped in them. */
static int vib_freeze(struct virtio_device *vdev)
{
	return -EOPNOTSUPP;
}
#endif

static const unsigned int features[] = {
	VIRTIO_IOMMU_F_INPUT_RANGE,
	VIRTIO_IOMMU_F_DOMAIN_RANGE,
	VIRTIO_IOMMU_F_MAP_UNMAP,
	VIRTIO_IOMMU_F_PROBE,
	VIRTIO_IOMMU_F_BOUNCE_WINDOW,
	VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH,
};

static const struct virtio_device_id ids[] = {
	{ VIRTIO_ID_IOMMU, VIRTIO_DEV_ANY_ID },
	{ 0 },
};

static struct virtio_driver vib_driver = {
	.driver.name		= KBUILD_MODNAME,
	.driver.owner		= THIS_MODULE,
	.driver.suppress_bind_attrs = true,
	.feature_table		= features,
	.feature_table_size	= ARRAY_SIZE(features),
	.id_table		= ids,
	.probe			= vib_probe,
	.remove			= vib_remove,
#ifdef CONFIG_PM_SLEEP
	.freeze			= vib_freeze,
#endif
};

static int __init vib_init(void)
{
	int ret;

	ret = iova_cache_get();
	if (ret)
		return ret;
	ret = bus_register_notifier(&pci_bus_type, &vib_pci_notifier);
	if (ret)
		goto put_cache;
	ret = register_virtio_driver(&vib_driver);
	if (ret)
		goto unregister_notifier;
	return 0;

unregister_notifier:
	bus_unregister_notifier(&pci_bus_type, &vib_pci_notifier);
put_cache:
	iova_cache_put();
	return ret;
}
module_init(vib_init);

static void __exit vib_exit(void)
{
	unregister_virtio_driver(&vib_driver);
	bus_unregister_notifier(&pci_bus_type, &vib_pci_notifier);
	iova_cache_put();
}
module_exit(vib_exit);

MODULE_DEVICE_TABLE(virtio, ids);
MODULE_DESCRIPTION("Bounce windows of virtio-iommu for unpatched kernels (prototype)");
MODULE_LICENSE("GPL");
