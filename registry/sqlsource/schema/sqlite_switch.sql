-- SQLite 3.25 or later. Switches of limiting for a whole fleet; a missing row means on.
CREATE TABLE IF NOT EXISTS `t_ratelimite_switch` (
  `name` VARCHAR(64) NOT NULL,
  `enabled` TINYINT DEFAULT 1 NOT NULL,
  `changedAt` DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
  PRIMARY KEY (`name`)
);

-- What ON UPDATE CURRENT_TIMESTAMP is elsewhere.
CREATE TRIGGER IF NOT EXISTS `t_ratelimite_switch_modified` AFTER UPDATE ON `t_ratelimite_switch` FOR EACH ROW
WHEN OLD.`enabled` IS NOT NEW.`enabled`
BEGIN
  UPDATE `t_ratelimite_switch` SET `changedAt` = strftime('%Y-%m-%d %H:%M:%f', 'now') WHERE `name` = NEW.`name`;
END;
