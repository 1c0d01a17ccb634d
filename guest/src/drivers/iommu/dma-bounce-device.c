// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bouncing of small DMA: selection of devices
 *
 * A mapping that bounces gets a slot of its domain's pool (see dma-bounce-pool.c) instead of a
 * separate mapping in the IOMMU. dma-iommu.c first calls the functions of dma-bounce-map.c, and
 * maps the ordinary way if they decline. See dma-bounce-copy.c for the rules of copying.
 *
 * By default, a device bounces only if its driver has opted in with dma_bounce_opt_in(). The reason
 * is that some drivers keep mappings for long and never synchronise them, and no attribute marks
 * such mappings. An administrator can turn bouncing on or off for a device in sysfs, or turn it on
 * for all devices at boot with iommu.bounce=all.
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

/* Mode that iommu.bounce= sets */
enum dma_bounce_mode {
	DMA_BOUNCE_DEFAULT,	/* option not given: use windows if the IOMMU offers them */
	DMA_BOUNCE_OFF,
	DMA_BOUNCE_AUTO,	/* use pages of the guest if there are no windows */
};

static enum dma_bounce_mode dma_bounce_mode __ro_after_init;
static struct dma_bounce_thresholds dma_bounce_threshold_param __ro_after_init;
bool dma_bounce_all_devices __ro_after_init;

static const char * const dma_bounce_switch_names[] = { "auto", "on", "off" };

static int __init dma_bounce_setup(char *str)
{
	size_t bytes, pages, write;
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
			pages = str_has_prefix(word, "pages=");
			write = str_has_prefix(word, "write=");
			bytes = memparse(word + pages + write, &end);
			if (*end || !bytes || (pages && bytes > DMA_BOUNCE_MAX_PAGE_POOL)) {
				pr_err("iommu.bounce: %s is unknown or too large\n", word);
				continue;
			}
			if (pages)
				dma_bounce_page_pool_size = ALIGN(bytes, DMA_BOUNCE_PAGE_CHUNK);
			else if (write)
				dma_bounce_threshold_param.write = min(bytes, DMA_BOUNCE_MAX_SLOT);
			else
				dma_bounce_threshold_param.read = min(bytes, DMA_BOUNCE_MAX_SLOT);
			if (dma_bounce_mode == DMA_BOUNCE_DEFAULT)
				dma_bounce_mode = DMA_BOUNCE_AUTO;
		}
	}
	return 0;
}
early_param("iommu.bounce", dma_bounce_setup);

/**
 * dma_bounce_allowed - check if bouncing is allowed
 *
 * Return: false if iommu.bounce=off was given at boot, or if the guest's memory is encrypted.
 * Devices of such a guest can access only decrypted memory, and bounce memory is not decrypted.
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

/**
 * dma_bounce_opt_in - allow small DMA of a device to bounce
 * @dev: the device, which is being probed
 *
 * A driver may call this function if it follows the DMA API's rules on the ownership of buffers.
 * The driver must unmap or synchronise each streaming mapping before the CPU looks at the buffer.
 * The opt-in ends when the driver is unbound.
 */
void dma_bounce_opt_in(struct device *dev)
{
	if (!dev->iommu || devm_add_action(dev, dma_bounce_opt_out, dev))
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

/* Parses a threshold. Returns false if it is invalid. */
static bool parse_threshold(const char *buf, unsigned long long *bytes)
{
	char *end;

	*bytes = memparse(buf, &end);
	return end != buf && (!*end || *end == '\n') && *bytes <= DMA_BOUNCE_MAX_SLOT;
}

static ssize_t threshold_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(dev->iommu->bounce.threshold.read));
}

/* Sets the thresholds of both directions. */
static ssize_t threshold_store(struct device *dev, struct device_attribute *attr, const char *buf,
			       size_t len)
{
	unsigned long long bytes;

	if (!parse_threshold(buf, &bytes))
		return -EINVAL;
	WRITE_ONCE(dev->iommu->bounce.threshold.read, bytes);
	WRITE_ONCE(dev->iommu->bounce.threshold.write, bytes);
	return len;
}
static DEVICE_ATTR_RW(threshold);

static ssize_t threshold_write_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(dev->iommu->bounce.threshold.write));
}

static ssize_t threshold_write_store(struct device *dev, struct device_attribute *attr,
				     const char *buf, size_t len)
{
	unsigned long long bytes;

	if (!parse_threshold(buf, &bytes))
		return -EINVAL;
	WRITE_ONCE(dev->iommu->bounce.threshold.write, bytes);
	return len;
}
static DEVICE_ATTR_RW(threshold_write);

static struct attribute *dma_bounce_attrs[] = {
	&dev_attr_mode.attr,
	&dev_attr_threshold.attr,
	&dev_attr_threshold_write.attr,
	NULL
};

static const struct attribute_group dma_bounce_group = {
	.name	= "iommu_bounce",
	.attrs	= dma_bounce_attrs,
};

/*
 * Reserves the range of IOVA in which a provider maps chunks, so that no other mapping uses it. The
 * host should report the range as reserved, but not every host does. Reserving a reserved range
 * again does no harm.
 */
static bool reserve_range(struct iova_domain *iovad, const struct dma_bounce_limits *limits)
{
	dma_addr_t last = limits->iova + limits->len - 1;

	return reserve_iova(iovad, iova_pfn(iovad, limits->iova), iova_pfn(iovad, last));
}

/**
 * dma_bounce_init_domain - set up bouncing for a device that got a DMA domain
 * @domain: the domain
 * @dev: the device
 * @iovad: the domain's IOVA allocator
 *
 * Makes the device's files in sysfs. Makes the domain's pool if windows are offered or the boot
 * option asks for a pool. The group's mutex serialises calls for one domain.
 */
void dma_bounce_init_domain(struct iommu_domain *domain, struct device *dev,
			    struct iova_domain *iovad)
{
	const struct dma_bounce_ops *ops = domain->ops->bounce_ops;
	struct dma_bounce_limits limits = {};

	/*
	 * Forget the pool of the device's old domain. The device has had no mappings since the old
	 * domain ended. The new domain may have no pool, for example if it is not for DMA.
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
		/* The range is still free. The kernel's pages get a range at first use. */
		if (ops != &dma_bounce_page_ops && !reserve_range(iovad, &limits))
			return;
		domain->bounce = dma_bounce_pool_create(domain, iovad, ops, dev,
							&dma_bounce_threshold_param);
		if (!domain->bounce)
			return;
		dma_bounce_share_add(domain->bounce);
		static_branch_inc(&dma_bounce_key);
	}
	WRITE_ONCE(dev->iommu->bounce.pool, domain->bounce);
	dma_bounce_lender_set(dev, domain->bounce);
}

/**
 * dma_bounce_free_domain - free the pool of a DMA domain that is being freed
 * @domain: the domain, which no longer has devices
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
 * dma_bounce_stop - give all chunks back before the last device leaves a domain
 * @domain: the domain, which need not have a pool
 *
 * For IOMMU drivers whose domains lose the provider's chunks when the last device leaves. Must be
 * called before the device leaves. May sleep.
 */
void dma_bounce_stop(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_stop(domain->bounce);
}
EXPORT_SYMBOL_GPL(dma_bounce_stop);

/**
 * dma_bounce_start - use the pool again after the first device was attached to a domain
 * @domain: the domain, which need not have a pool
 *
 * Reverts dma_bounce_stop().
 */
void dma_bounce_start(struct iommu_domain *domain)
{
	if (domain->bounce)
		dma_bounce_pool_resume(domain->bounce);
}
EXPORT_SYMBOL_GPL(dma_bounce_start);

/**
 * dma_bounce_release_device - remove the files of a device that leaves its IOMMU
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
