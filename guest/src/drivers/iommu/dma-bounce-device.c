// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: whose DMA bounces
 *
 * A mapping that bounces gets a slot of its domain's pool (see dma-bounce-pool.c) instead of a
 * mapping of its own. dma-iommu.c asks first (see dma-bounce-map.c) and goes the ordinary way if
 * that declines. What is copied when is in dma-bounce-copy.c.
 *
 * Who: devices whose driver has opted in with dma_bounce_opt_in(), because there are mappings that
 * live long and are never synchronised, which no attribute tells. An administrator can switch it on
 * or off for a device in sysfs, and on for all at boot with iommu.bounce=all.
 */

#define pr_fmt(fmt) "iommu: bounce: " fmt

#include <linux/cc_platform.h>
#include <linux/device.h>
#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/pci.h>

#include "dma-bounce-device.h"
#include "dma-bounce-lend.h"
#include "dma-bounce-pages.h"
#include "dma-bounce-pool.h"
#include "dma-bounce-share.h"

DEFINE_STATIC_KEY_FALSE(dma_bounce_key);

const u8 dma_bounce_lend_owner;
EXPORT_SYMBOL_GPL(dma_bounce_lend_owner);

/* What iommu.bounce= says */
enum dma_bounce_mode {
	DMA_BOUNCE_DEFAULT,	/* nothing: use windows if there are any */
	DMA_BOUNCE_OFF,
	DMA_BOUNCE_AUTO,	/* also pages of the guest */
};

static enum dma_bounce_mode dma_bounce_mode __ro_after_init;
static size_t dma_bounce_threshold_param __ro_after_init;
bool dma_bounce_all_devices __ro_after_init;

static const char * const dma_bounce_switch_names[] = { "auto", "on", "off" };

static int __init dma_bounce_setup(char *str)
{
	size_t bytes, prefix;
	char *word, *end;

	if (!str)
		return -EINVAL;
	while ((word = strsep(&str, ","))) {
		if (!strcmp(word, "off")) {
			dma_bounce_mode = DMA_BOUNCE_OFF;
		} else if (!strcmp(word, "auto") || !strcmp(word, "all")) {
			dma_bounce_mode = DMA_BOUNCE_AUTO;
			dma_bounce_all_devices = !strcmp(word, "all");
		} else {
			prefix = str_has_prefix(word, "pages=");
			bytes = memparse(word + prefix, &end);
			if (*end || !bytes || (prefix && bytes > DMA_BOUNCE_MAX_PAGE_POOL)) {
				pr_err("iommu.bounce: %s is not known, or too much\n", word);
				continue;
			}
			if (prefix)
				dma_bounce_page_pool_size = ALIGN(bytes, DMA_BOUNCE_PAGE_CHUNK);
			else
				dma_bounce_threshold_param = bytes;
			if (dma_bounce_mode == DMA_BOUNCE_DEFAULT)
				dma_bounce_mode = DMA_BOUNCE_AUTO;
		}
	}
	return 0;
}
early_param("iommu.bounce", dma_bounce_setup);

/**
 * dma_bounce_allowed - may providers be used at all
 *
 * Return: false if iommu.bounce=off was given at boot, and in guests whose memory is encrypted:
 * what their devices reach is decrypted first, which nobody does to bounce memory.
 */
bool dma_bounce_allowed(void)
{
	return dma_bounce_mode != DMA_BOUNCE_OFF && !cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT);
}
EXPORT_SYMBOL_GPL(dma_bounce_allowed);

static void dma_bounce_opt_out(void *data)
{
	struct device *dev = data;

	if (dev->iommu)
		WRITE_ONCE(dev->iommu->bounce.opt_in, false);
}

/*
 * The driver of a bus opts in for all that is on it. What graphics drivers map stays mapped, and
 * not all of them synchronise it: virtio-gpu of 6.12 never does before the CPU looks at it.
 */
static bool maps_for_long(struct device *dev)
{
	return dev_is_pci(dev) && to_pci_dev(dev)->class >> 16 == PCI_BASE_CLASS_DISPLAY;
}

/**
 * dma_bounce_opt_in - let small DMA of a device be bounced
 * @dev: the device, which is being probed
 *
 * To be called by drivers that keep the rules of the DMA API about who owns a buffer when: each
 * streaming mapping is unmapped or synchronised before the CPU looks at it. Ends when the driver is
 * unbound. Does nothing for a display controller.
 */
void dma_bounce_opt_in(struct device *dev)
{
	if (!dev->iommu || maps_for_long(dev) || devm_add_action(dev, dma_bounce_opt_out, dev))
		return;
	WRITE_ONCE(dev->iommu->bounce.opt_in, true);
}
EXPORT_SYMBOL_GPL(dma_bounce_opt_in);

/* Set-up */

static ssize_t mode_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	unsigned int i, now = READ_ONCE(dev->iommu->bounce.choice), n = 0;

	for (i = 0; i < ARRAY_SIZE(dma_bounce_switch_names); i++)
		n += sysfs_emit_at(buf, n, i == now ? "[%s] " : "%s ", dma_bounce_switch_names[i]);
	return n + sysfs_emit_at(buf, n, "\n");
}

static ssize_t mode_store(struct device *dev, struct device_attribute *attr, const char *buf,
			  size_t len)
{
	int i = sysfs_match_string(dma_bounce_switch_names, buf);

	if (i < 0)
		return i;
	WRITE_ONCE(dev->iommu->bounce.choice, i);
	return len;
}
static DEVICE_ATTR_RW(mode);

static ssize_t threshold_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(dev->iommu->bounce.threshold));
}

static ssize_t threshold_store(struct device *dev, struct device_attribute *attr, const char *buf,
			       size_t len)
{
	unsigned long long bytes;
	char *end;

	bytes = memparse(buf, &end);
	if (end == buf || (*end && *end != '\n') || bytes > DMA_BOUNCE_MAX_SLOT)
		return -EINVAL;
	WRITE_ONCE(dev->iommu->bounce.threshold, bytes);
	return len;
}
static DEVICE_ATTR_RW(threshold);

static struct attribute *dma_bounce_attrs[] = {
	&dev_attr_mode.attr,
	&dev_attr_threshold.attr,
	NULL
};

static const struct attribute_group dma_bounce_group = {
	.name	= "iommu_bounce",
	.attrs	= dma_bounce_attrs,
};

/*
 * Takes the range of IOVA in which a provider maps chunks, so that nothing else is mapped there. A
 * provider should have it reserved, but what the host forgot to say must not confuse us. What is
 * reserved already stays so.
 */
static bool reserve_range(struct iova_domain *iovad, const struct dma_bounce_limits *limits)
{
	dma_addr_t last = limits->iova + limits->len - 1;

	return reserve_iova(iovad, iova_pfn(iovad, limits->iova), iova_pfn(iovad, last));
}

/**
 * dma_bounce_init_domain - a device got a DMA domain
 * @domain: the domain
 * @dev: the device
 * @iovad: the domain's IOVA allocator
 *
 * Makes the domain's pool if windows are offered or the boot option asks for it, and the device's
 * switch in sysfs. Calls for one domain are serialised by its group's mutex.
 */
void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
			    struct iova_domain *iovad)
{
	const struct dma_bounce_ops *ops = domain->ops->bounce_ops;
	struct dma_bounce_limits limits = {};

	/*
	 * No mapping comes between the end of an old domain and this, nor after a domain without a
	 * pool, one that is not for DMA for example.
	 */
	WRITE_ONCE(dev->iommu->bounce.pool, NULL);
	dma_bounce_lender_set(dev, NULL);
	dev->iommu->bounce.untrusted = dev_is_pci(dev) && to_pci_dev(dev)->untrusted;
	if (!dma_bounce_allowed())
		return;
	if (!ops || ops->limits(domain, &limits)) {
		if (dma_bounce_mode == DMA_BOUNCE_DEFAULT)
			return;
		ops = &dma_bounce_page_ops;
	}
	if (!dev->iommu->bounce.files)
		dev->iommu->bounce.files = !device_add_group(dev, &dma_bounce_group);
	if (!domain->bounce) {
		/* Nothing is mapped yet. Pages of the kernel take a range when the pool is used. */
		if (ops != &dma_bounce_page_ops && !reserve_range(iovad, &limits))
			return;
		domain->bounce = dma_bounce_pool_create(domain, iovad, ops, dev,
							dma_bounce_threshold_param);
		if (!domain->bounce)
			return;
		dma_bounce_share_add(domain->bounce);
		static_branch_inc(&dma_bounce_key);
	}
	WRITE_ONCE(dev->iommu->bounce.pool, domain->bounce);
	dma_bounce_lender_set(dev, domain->bounce);
}

/**
 * dma_bounce_free_domain - a DMA domain goes away
 * @domain: the domain, which has no devices any more
 */
void dma_bounce_free_domain(struct iommu_domain *domain)
{
	struct dma_bounce_pool *pool = domain->bounce;

	if (!pool)
		return;
	dma_bounce_share_del(pool);
	dma_bounce_lend_end(pool);
	dma_bounce_pool_destroy(pool);
	domain->bounce = NULL;
	static_branch_dec(&dma_bounce_key);
}

/**
 * dma_bounce_stop - the last device is about to leave a domain
 * @domain: the domain, which need not be one that bounces
 *
 * For IOMMU drivers whose domains lose the chunks of their provider then. To be called before the
 * device leaves. May sleep.
 */
void dma_bounce_stop(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_stop(domain->bounce);
}
EXPORT_SYMBOL_GPL(dma_bounce_stop);

/**
 * dma_bounce_start - the first device was attached to a domain
 * @domain: the domain, which need not be one that bounces
 *
 * The opposite of dma_bounce_stop().
 */
void dma_bounce_start(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_resume(domain->bounce);
}
EXPORT_SYMBOL_GPL(dma_bounce_start);

/**
 * dma_bounce_release_device - a device leaves its IOMMU
 * @dev: the device
 */
void dma_bounce_release_device(struct device *dev)
{
	dma_bounce_lender_del(dev);
	if (!dev->iommu || !dev->iommu->bounce.files)
		return;
	device_remove_group(dev, &dma_bounce_group);
	dev->iommu->bounce.files = false;
}
