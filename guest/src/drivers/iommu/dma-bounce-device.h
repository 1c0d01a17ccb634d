/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Selection of devices whose DMA bounces. See the comment at the top of dma-bounce-device.c.
 */
#ifndef _DMA_BOUNCE_DEVICE_H
#define _DMA_BOUNCE_DEVICE_H

#include <linux/compiler.h>
#include <linux/device.h>
#include <linux/dma-bounce.h>
#include <linux/iommu.h>
#include <linux/jump_label.h>

struct iova_domain;

/* Mode of one device, as set in sysfs */
enum dma_bounce_switch {
	DMA_BOUNCE_SWITCH_AUTO,
	DMA_BOUNCE_SWITCH_ON,
	DMA_BOUNCE_SWITCH_OFF,
};

#ifdef CONFIG_IOMMU_DMA_BOUNCE

/* Enabled as long as any domain has a pool */
DECLARE_STATIC_KEY_FALSE(dma_bounce_key);

void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
			    struct iova_domain *iovad);
void dma_bounce_free_domain(struct iommu_domain *domain);
void dma_bounce_release_device(struct device *dev);

/* True if the boot parameter is iommu.bounce=all */
extern bool dma_bounce_all_devices;

/**
 * dma_bounce_wanted - check if small DMA of a device should bounce
 * @dev: the device, which has a DMA domain
 *
 * Return: true if the mode in sysfs is on. If the mode is auto, true if the driver opted in or the
 * boot parameter enables all devices.
 */
static inline bool dma_bounce_wanted(struct device *dev)
{
	struct dma_bounce_device *bounce = &dev->iommu->bounce;
	u8 choice = READ_ONCE(bounce->choice);

	if (likely(choice == DMA_BOUNCE_SWITCH_AUTO))
		return READ_ONCE(bounce->opt_in) || dma_bounce_all_devices;
	return choice == DMA_BOUNCE_SWITCH_ON;
}

#else /* !CONFIG_IOMMU_DMA_BOUNCE */

static inline void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
					  struct iova_domain *iovad)
{
}

static inline void dma_bounce_free_domain(struct iommu_domain *domain)
{
}

static inline void dma_bounce_release_device(struct device *dev)
{
}

#endif /* CONFIG_IOMMU_DMA_BOUNCE */
#endif /* _DMA_BOUNCE_DEVICE_H */
